// The loss of predicted tokens, in fp32 for logits of any type.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

// logits: [..., vocabulary]; targets: [...], int64. The mean of -log(probability) over the targets
// that are not kNoTarget; 0 if there are none.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace fsdp::nn
