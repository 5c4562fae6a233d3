// How much arithmetic a token costs: what TFLOP/s and model FLOPs utilisation count.
#pragma once

#include <cstdint>

#include "fsdp/nn/architecture.h"

namespace fsdp {

// Floating-point operations of one token's forward and backward in a sequence of this length: those
// of matrix products, a multiplication and an addition counting two, the backward twice the
// forward. Attention looks at the positions before it, (sequence + 1) / 2 on average; the embedding
// is a lookup and costs nothing; of experts those that are chosen count. What is recomputed does
// not count, as is usual for utilisation.
double flops_per_token(const ModelConfig& config, int64_t sequence);

}  // namespace fsdp
