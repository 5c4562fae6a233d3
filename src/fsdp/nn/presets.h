// The models that can be trained by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/nn/architecture.h"

namespace fsdp {

struct ModelPreset {
  const char* name;
  const char* summary;  // a few words for tables
  ModelConfig config;
};

// Smallest first; the first one is what `fsdp train` takes when nobody says anything.
std::span<const ModelPreset> model_presets();

std::vector<std::string> preset_names();

// Null when there is none of this name.
const ModelPreset* find_preset(std::string_view name);

}  // namespace fsdp
