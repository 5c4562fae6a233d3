// The loss of a language model's head without the logits of all tokens: head and cross entropy are
// one function, which works through the tokens chunk by chunk.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/nn/layers/rank_logits.h"

namespace fsdp::nn {

struct HeadLossOptions {
  int64_t logit_bytes = kDefaultLogitBytes;  // of a chunk
  LogitRanks ranks = {};
};

// hidden: [..., hidden size], with ranks [batch, sequence / tp, hidden size]; weight: [vocabulary,
// hidden size], with LogitPart::kVocabulary this rank's rows of it; targets: [...], int64, with
// ranks those of the whole sequence. The mean of -log(probability) over the targets that are not
// kNoTarget; 0 if there are none. The same on all ranks.
//
// The forward computes both gradients, if they are wanted: from a chunk's logits it makes softmax
// minus one at the target, in their place, and multiplies that with the weight and with the hidden
// rows. It leaves the gradient of hidden, in its type, and that of the weight, in fp32 or its wider
// type; the backward multiplies them with that of the loss, and needs neither logits nor ranks.
at::Tensor head_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                     const HeadLossOptions& options = {});

}  // namespace fsdp::nn
