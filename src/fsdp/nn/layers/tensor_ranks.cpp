#include "fsdp/nn/layers/tensor_ranks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/rank_slices.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kSequenceDim = 1;

// --- there or back -------------------------------------------------------------------------------

at::Tensor slices_gathered(const at::Tensor& own, int64_t dim, Communicator& ranks) {
  return GatheredSlices(own, dim, ranks).wait();
}

at::Tensor sums_scattered(const at::Tensor& parts, int64_t dim, Communicator& ranks) {
  return ScatteredSums(parts, dim, ranks).wait();
}

at::Tensor slice_kept(const at::Tensor& whole, int64_t dim, Communicator& ranks) {
  const int64_t size = whole.size(dim) / ranks.size();
  return whole.narrow(dim, ranks.rank() * size, size);
}

at::Tensor all_summed(const at::Tensor& parts, int64_t, Communicator& ranks) {
  at::Tensor sum = parts.clone(at::MemoryFormat::Contiguous);
  ranks.all_reduce(sum, {}, "parts of sums").wait();
  return sum;
}

at::Tensor kept(const at::Tensor& whole, int64_t, Communicator&) { return whole; }

using Way = at::Tensor (*)(const at::Tensor&, int64_t dim, Communicator&);

struct RankExchange final : torch::CustomClassHolder {
  RankExchange(const MeshAxis& ranks, int64_t along, Way forward, Way backward)
      : axis(ranks), dim(along), there(forward), back(backward) {}
  const MeshAxis& axis;
  const int64_t dim;
  const Way there;
  const Way back;
};
using Exchange = c10::intrusive_ptr<RankExchange>;

class ExchangeFunction final : public torch::autograd::Function<ExchangeFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const Exchange& exchange) {
    context->saved_data["exchange"] = c10::IValue::make_capsule(exchange);
    return exchange->there(input, exchange->dim, exchange->axis.gather());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Exchange exchange = c10::static_intrusive_pointer_cast<RankExchange>(
        context->saved_data["exchange"].toCapsule());
    return {exchange->back(gradients[0], exchange->dim, exchange->axis.reduce()), at::Tensor()};
  }
};

at::Tensor exchanged(const at::Tensor& input, const MeshAxis* tp, int64_t dim, Way there,
                     Way back) {
  if (tp == nullptr) return input;
  return ExchangeFunction::apply(input, c10::make_intrusive<RankExchange>(*tp, dim, there, back));
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

at::Tensor sum_over_ranks(const at::Tensor& parts, const MeshAxis* tp) {
  return exchanged(parts, tp, 0, all_summed, kept);
}

at::Tensor mean_over_ranks(const at::Tensor& own, const MeshAxis* tp) {
  return tp == nullptr ? own : sum_over_ranks(own, tp) / static_cast<double>(tp->size());
}

at::Tensor whole_along(int64_t dim, const at::Tensor& own, const MeshAxis* tp) {
  return exchanged(own, tp, dim, slices_gathered, slice_kept);
}

void check_decodes_alone(const MeshAxis* tp) {
  if (tp != nullptr)
    throw UsageError(
        concat("tp = ", tp->size(),
               " ranks share the tokens of a sequence, so they cannot decode one after the other; "
               "load the checkpoint on a mesh without tp"));
}

}  // namespace fsdp::nn
