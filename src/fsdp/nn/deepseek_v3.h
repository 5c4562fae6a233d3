// What DeepSeek-V3's layers are made of.
#pragma once

#include <string>
#include <vector>

#include "fsdp/nn/llama.h"

namespace fsdp::nn {

// For each layer, and in the end for a layer that predicts one more token.
std::vector<LlamaBlockOptions> deepseek_v3_blocks(const DeepseekV3Config& config,
                                                  const BuildOptions& build);

// What published checkpoints have of layers of multi-token prediction, and the model has not.
std::vector<std::string> deepseek_v3_ignored_names(const DeepseekV3Config& config);

}  // namespace fsdp::nn
