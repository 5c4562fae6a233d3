#include "fsdp/train/calibration/autograd_calls.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

namespace fsdp::train {

std::function<void()> forward_call(const TensorFunction& function,
                                   const std::vector<at::Tensor>& inputs) {
  return [=] {
    const at::NoGradGuard no_grad;
    function(inputs);
  };
}

std::function<void()> backward_call(const TensorFunction& function,
                                    const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().set_requires_grad(true));
  const std::vector<at::Tensor> outputs = function(leaves);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& output : outputs) gradients.push_back(at::ones_like(output));
  return [=] { torch::autograd::grad(outputs, leaves, gradients, /*retain_graph=*/true); };
}

}  // namespace fsdp::train
