#include "fsdp/nn/layers/cross_entropy.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/nn/kernels/kernel_calls.h"

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

// The same without a matrix of probabilities: keeps the logits and the sums of their rows.
class CrossEntropyByKernel final : public torch::autograd::Function<CrossEntropyByKernel> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_in,
                            const at::Tensor& targets_in) {
    const at::Tensor logits = logits_in.contiguous();
    const at::Tensor targets = targets_in.contiguous();
    const auto numbers = logits.options().dtype(at::kFloat);
    const at::Tensor row_sums = at::empty({logits.size(0), 2}, numbers);
    const at::Tensor row_losses = at::empty({logits.size(0)}, numbers);
    const at::Tensor weight = at::empty({}, numbers);
    at::Tensor loss = at::empty({}, numbers);
    const OnDeviceOf on_device(logits);
    cross_entropy_on_device(memory_of(logits, targets, row_sums, weight),
                            row_losses.mutable_data_ptr<float>(), loss.mutable_data_ptr<float>(),
                            on_device.stream());
    context->save_for_backward({logits, targets, row_sums, weight});
    return loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor loss_gradient = gradients[0].to(at::kFloat);
    at::Tensor gradient = at::empty_like(saved[0]);
    const OnDeviceOf on_device(gradient);
    cross_entropy_backward_on_device(memory_of(saved[0], saved[1], saved[2], saved[3]),
                                     loss_gradient.const_data_ptr<float>(),
                                     gradient.mutable_data_ptr(), on_device.stream());
    return {gradient, at::Tensor()};
  }

 private:
  static CrossEntropyMemory memory_of(const at::Tensor& logits, const at::Tensor& targets,
                                      const at::Tensor& row_sums, const at::Tensor& weight) {
    return {.dtype = dtype_of(logits.scalar_type()),
            .num_rows = logits.size(0),
            .vocabulary = logits.size(1),
            .logits = logits.const_data_ptr(),
            .targets = targets.const_data_ptr<int64_t>(),
            .row_sums = row_sums.mutable_data_ptr<float>(),
            .weight = weight.mutable_data_ptr<float>()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor rows = logits.reshape({-1, logits.size(-1)});
  const at::Tensor flat_targets = targets.reshape({-1});
  if (has_kernels(rows)) return CrossEntropyByKernel::apply(rows, flat_targets);
  return CrossEntropy::apply(rows, flat_targets);
}

}  // namespace fsdp::nn
