// Cross entropy of rows of logits, in fp32 for logits of any type: sums of the rows, the gradient
// in the logits' place, and the mean. layer_kernels.h tells what the sums are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

struct LogitRows {
  at::Tensor logits;   // [rows, columns]
  at::Tensor targets;  // [rows], int64: tokens of the vocabulary, or kNoTarget
  at::Tensor sums;     // [kRowSums, rows], fp32, of a stride of 1 along the rows
  // Columns are tokens of the vocabulary from this one on.
  int64_t first_token = 0;
  int64_t vocabulary = 0;
};

// Softmax minus one at the target, in the logits' type and perhaps in their memory; rows without
// target: 0. Undefined for RowWork::kSums.
at::Tensor cross_entropy_rows(RowWork work, const LogitRows& rows);

struct MeanLoss {
  at::Tensor loss;    // one number, fp32
  at::Tensor weight;  // one number, fp32: of each row in it
};

// The rows' losses, divided by the number of all targets that are tokens (by 1 without any).
MeanLoss mean_cross_entropy(const at::Tensor& sums, const at::Tensor& targets,
                            const at::Tensor& all_targets);

}  // namespace fsdp::nn
