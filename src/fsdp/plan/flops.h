// The arithmetic cost of a token, on which TFLOP/s and model FLOPs utilisation are based.
#pragma once

#include <cstdint>

#include "fsdp/nn/config/lora_options.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/model_layers.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

// Floating-point operations of one token's forward and backward in a sequence of this length: those
// of matrix products (two per multiplication and addition), the backward twice the forward.
// Attention sees (sequence + 1) / 2 positions on average; the embedding is a lookup and costs
// nothing; only chosen experts count. Recomputation does not count, as is usual for utilisation.
// Frozen weights under adapters have no gradients, so their backward is once the forward.
double flops_per_token(const ModelConfig& config, int64_t sequence, const LoraOptions& lora = {});

// Products of a token's forward in a block, of two operations each: with a tensor's matrices (of
// experts with those of the chosen ones), and beside weights.
double multiplied_elements(const TensorShape& tensor);
double mixing_products(const BlockShape& block, int64_t sequence);

}  // namespace fsdp
