#include "fsdp/nn/layers/tensor_ranks.h"

#include <ATen/ATen.h>

#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/rank_slices.h"

namespace fsdp::nn {

namespace {

constexpr int64_t kSequenceDim = 1;

at::Tensor summed(const at::Tensor& parts, int64_t, Communicator& ranks) {
  return all_summed(parts, ranks);
}

at::Tensor kept(const at::Tensor& whole, int64_t, Communicator&) { return whole; }

using Way = at::Tensor (*)(const at::Tensor&, int64_t dim, Communicator&);

at::Tensor exchanged(const at::Tensor& input, const MeshAxis* tp, int64_t dim, Way there,
                     Way back) {
  if (tp == nullptr) return input;
  return along_ranks(
      input, [=](const at::Tensor& each) { return there(each, dim, tp->gather()); },
      [=](const at::Tensor& each) { return back(each, dim, tp->reduce()); });
}

void check_even(const at::Tensor& whole, const MeshAxis* tp) {
  if (tp != nullptr && whole.size(kSequenceDim) % tp->size() != 0)
    throw UsageError(concat("a sequence has ", whole.size(kSequenceDim), " tokens, which tp ",
                            tp->size(),
                            " ranks cannot share evenly; choose a sequence length that "
                            "tp divides"));
}

}  // namespace

at::Tensor scatter_sequence(const at::Tensor& parts, const MeshAxis* tp) {
  check_even(parts, tp);
  return exchanged(parts, tp, kSequenceDim, sums_scattered, slices_gathered);
}

at::Tensor gather_sequence(const at::Tensor& own, const MeshAxis* tp) {
  return exchanged(own, tp, kSequenceDim, slices_gathered, sums_scattered);
}

at::Tensor own_sequence(const at::Tensor& whole, const MeshAxis* tp) {
  check_even(whole, tp);
  return tp == nullptr ? whole : slice_kept(whole, kSequenceDim, tp->gather());
}

at::Tensor mean_over_ranks(const at::Tensor& own, const MeshAxis* tp) {
  return tp == nullptr ? own
                       : exchanged(own, tp, 0, summed, kept) / static_cast<double>(tp->size());
}

at::Tensor whole_logits(const at::Tensor& logits, const LogitRanks& ranks) {
  return exchanged(logits, ranks.tp, ranks.part == LogitPart::kSequence ? 1 : 2, slices_gathered,
                   slice_kept);
}

}  // namespace fsdp::nn
