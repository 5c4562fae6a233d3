// In which fields of config.json two models differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/nn/architecture.h"

namespace fsdp {

// What has to be the same: the tensors alone, or what is computed with them, too. What only
// training and initial values depend on never has to.
enum class ModelAspect : uint8_t { kTensors, kResults };

struct FieldDifference {
  std::string field;
  std::string before;  // JSON, or "none"
  std::string now;
};

// In the order of config.json. Models of different types have the one difference of their types.
std::vector<FieldDifference> differing_fields(const ModelConfig& before, const ModelConfig& now,
                                              ModelAspect aspect);

}  // namespace fsdp
