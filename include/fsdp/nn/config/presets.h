// The models that can be trained by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/nn/config/model_config.h"

namespace fsdp {

struct ModelPreset {
  const char* name;
  const char* summary;  // a few words for tables
  ModelConfig config;
};

// Smallest first; the first one is the default of `fsdp train`.
std::span<const ModelPreset> model_presets();

std::vector<std::string> preset_names();

// nullptr for an unknown name.
const ModelPreset* find_preset(std::string_view name);

}  // namespace fsdp
