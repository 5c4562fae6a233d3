// Manifests with a defect that their checksum does not reveal.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "fsdp/checkpoint/format/manifest.h"

namespace fsdp::testing {

inline std::string resealed(nlohmann::json manifest) {
  manifest.erase("crc32c");
  return with_checksum(manifest.dump(1) + "\n");
}

}  // namespace fsdp::testing
