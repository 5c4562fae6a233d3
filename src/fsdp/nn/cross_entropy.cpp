#include "fsdp/nn/cross_entropy.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradient is softmax minus one at the target: made in one matrix, where autograd would keep
// and fill three.
class CrossEntropy final : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets) {
    const at::Tensor log_probability = at::log_softmax(logits, -1, at::kFloat);
    const at::Tensor is_target = targets.ne(kNoTarget);
    const at::Tensor index = targets.masked_fill(is_target.logical_not(), 0).unsqueeze(1);
    const at::Tensor weight =
        is_target.to(at::kFloat) / is_target.sum().clamp_min(1).to(at::kFloat);  // of each row
    context->save_for_backward({log_probability, index, weight});
    context->saved_data["dtype"] = static_cast<int64_t>(logits.scalar_type());
    return log_probability.gather(1, index).squeeze(1).mul_(weight).sum().neg_();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const at::Tensor row_weight = (saved[2] * gradients[0]).unsqueeze(1);
    const at::Tensor gradient = saved[0].exp();
    gradient.mul_(row_weight).scatter_add_(1, saved[1], row_weight.neg());
    return {gradient.to(dtype), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return CrossEntropy::apply(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

}  // namespace fsdp::nn
