#include "fsdp/nn/layers/rank_logits.h"

#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

at::Tensor whole_logits(const at::Tensor& logits, const LogitRanks& ranks) {
  return whole_along(ranks.part == LogitPart::kSequence ? 1 : 2, logits, ranks.tp);
}

}  // namespace fsdp::nn
