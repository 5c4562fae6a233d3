// Reads every byte of a checkpoint and tells all that is not what was written.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp {

struct DamagedPart {
  std::string path;  // below the checkpoint
  std::string what;  // "bytes 0 to 1048576 are not what was written", "is missing"

  friend bool operator==(const DamagedPart&, const DamagedPart&) = default;
};

struct Verification {
  // Other tools write none; then this says that all bytes can be read and all headers are right.
  bool has_checksums = false;
  // Whether manifest.json has one, too; version 1 had not.
  bool has_manifest_checksum = false;
  int64_t num_files = 0;
  int64_t bytes = 0;
  std::vector<DamagedPart> damaged;
};

// `path` is a checkpoint, or plain safetensors files. Goes on after the first fault, so that the
// list is complete; an Error only where nothing can be said (no such path, a manifest that cannot
// be read). `on_progress` is told how many bytes of how many are done.
Verification verify_files(const std::string& path,
                          const std::function<void(int64_t done, int64_t total)>& on_progress = {});

}  // namespace fsdp
