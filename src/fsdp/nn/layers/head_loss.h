// The loss of a language model's head without the logits of all tokens: head and cross entropy are
// one function, which works through the tokens chunk by chunk.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

// --- cross entropy of rows of logits -------------------------------------------------------------

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

// --- head and loss -------------------------------------------------------------------------------

struct HeadLossOptions {
  int64_t logit_bytes = kDefaultLogitBytes;  // of a chunk
  double soft_cap = 0;                       // logits are cap * tanh(logits / cap); 0: as they are
  LogitRanks ranks = {};
};

// hidden: [..., hidden size], with ranks [batch, sequence / tp, hidden size]; weight: [vocabulary,
// hidden size], with LogitPart::kVocabulary this rank's rows of it; targets: [...], int64, with
// ranks those of the whole sequence. The mean of -log(probability) over the targets that are not
// kNoTarget; 0 if there are none. The same on all ranks.
//
// The forward computes the gradients that are wanted, from a chunk's logits while they are there:
// the one of hidden in its type, the weight's in fp32 or wider. The backward only multiplies them
// with the loss's gradient.
at::Tensor head_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                     const HeadLossOptions& options = {});

// The loss and the gradients that are wanted, without autograd: for whoever has a formula of its
// own. Gradients are those of the sum of all rows' losses; times mean.weight they are the mean's.
struct WantedGradients {
  bool of_hidden = false;
  bool of_weight = false;
  bool any() const { return of_hidden || of_weight; }
};
struct HeadLossParts {
  MeanLoss mean;
  at::Tensor hidden_gradient;  // undefined: not wanted
  at::Tensor weight_gradient;  // fp32 or wider
};
HeadLossParts head_loss_parts(const at::Tensor& hidden, const at::Tensor& weight,
                              const at::Tensor& targets, const HeadLossOptions& options,
                              const WantedGradients& wanted);

}  // namespace fsdp::nn
