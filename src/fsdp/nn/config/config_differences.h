// The fields of config.json in which two models differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/nn/config/model_config.h"

namespace fsdp {

// What must be the same: the tensors alone, or the results, too. Fields that only training and
// initial values depend on may differ.
enum class ModelAspect : uint8_t { kTensors, kResults };

struct FieldDifference {
  std::string field;
  std::string before;  // JSON, or "none"
  std::string now;
};

// In the order of config.json. Models of different types differ in their type alone.
std::vector<FieldDifference> differing_fields(const ModelConfig& before, const ModelConfig& now,
                                              ModelAspect aspect);

}  // namespace fsdp
