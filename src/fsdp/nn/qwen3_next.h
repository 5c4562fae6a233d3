// What the layers of Qwen3-Next are made of.
#pragma once

#include <vector>

#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/nn/llama.h"

namespace fsdp::nn {

// One for each layer.
std::vector<LlamaBlockOptions> qwen3_next_blocks(const Qwen3NextConfig& config,
                                                 const BuildOptions& build);

}  // namespace fsdp::nn
