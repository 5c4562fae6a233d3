#include "fsdp/nn/layers/rank_logits.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/cross_entropy.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// As CrossEntropyByKernel: keeps the logits and a number per row, and no matrix of probabilities.
class VocabularyCrossEntropy final : public torch::autograd::Function<VocabularyCrossEntropy> {
 public:
  // logits: [rows, vocabulary / tp]; targets: [rows].
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, const MeshAxis* tp) {
    const int64_t size = logits.size(1);
    const at::Tensor is_target = targets.ne(kNoTarget);
    const at::Tensor local = targets - tp->rank() * size;
    const at::Tensor is_own = is_target.logical_and(local.ge(0)).logical_and_(local.lt(size));
    const at::Tensor index = local.masked_fill(is_own.logical_not(), 0).unsqueeze(1);
    const at::Tensor weight =
        is_target.to(at::kFloat) / is_target.sum().clamp_min(1).to(at::kFloat);  // of each row

    const at::Tensor most = logits.amax(1).to(at::kFloat);
    tp->gather().all_reduce(most, {.op = ReduceOp::kMax}, "largest logits").wait();
    const at::Tensor own_logit = logits.gather(1, index).squeeze(1).to(at::kFloat) - most;
    const at::Tensor sums = at::stack({(logits.to(at::kFloat) - most.unsqueeze(1)).exp_().sum(1),
                                       own_logit.masked_fill(is_own.logical_not(), 0.0)});
    tp->gather().all_reduce(sums, {}, "sums of exponentials").wait();
    const at::Tensor log_sum = sums[0].log();
    // Of each row: the logarithm of all exponentials, and the weight where this rank has the
    // target.
    context->save_for_backward({logits, log_sum + most, index, weight, weight * is_own});
    return sums[1].sub(log_sum).mul_(weight).sum().neg_();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const at::Tensor gradient = (logits.to(at::kFloat) - saved[1].unsqueeze(1)).exp_();
    gradient.mul_((saved[3] * gradients[0]).unsqueeze(1))
        .scatter_add_(1, saved[2], (saved[4] * gradients[0]).neg_().unsqueeze(1));
    return {gradient.to(logits.scalar_type()), at::Tensor(), at::Tensor()};
  }
};

at::Tensor sequence_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                  const MeshAxis* tp) {
  const at::Tensor own = own_sequence(targets, tp);
  const at::Tensor num_own = own.ne(kNoTarget).sum().to(at::kFloat);
  const at::Tensor num_all = targets.ne(kNoTarget).sum().clamp_min(1).to(at::kFloat);
  // From the mean over the targets of this rank, 0 without any, to its part of that over all.
  return sum_over_ranks(cross_entropy(logits, own) * (num_own / num_all), tp);
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const LogitRanks& ranks) {
  if (ranks.tp == nullptr) return cross_entropy(logits, targets);
  if (ranks.part == LogitPart::kSequence) return sequence_cross_entropy(logits, targets, ranks.tp);
  return VocabularyCrossEntropy::apply(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}),
                                       ranks.tp);
}

at::Tensor whole_logits(const at::Tensor& logits, const LogitRanks& ranks) {
  return whole_along(ranks.part == LogitPart::kSequence ? 1 : 2, logits, ranks.tp);
}

}  // namespace fsdp::nn
