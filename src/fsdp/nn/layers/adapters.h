// Puts adapters of low rank on a model's linear layers, and freezes the rest.
#pragma once

#include <torch/nn/module.h>

#include "fsdp/nn/config/lora_options.h"

namespace fsdp::nn {

// Before first values are set and before fully_shard(). Returns the options with the names of all
// layers that have an adapter now in `on`. UsageError for globs that name no layer.
LoraOptions add_adapters(torch::nn::Module& model, const LoraOptions& options);

}  // namespace fsdp::nn
