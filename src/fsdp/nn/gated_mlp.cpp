#include "fsdp/nn/gated_mlp.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class GatedSilu final : public torch::autograd::Function<GatedSilu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return at::silu(gate).mul_(up);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return {at::silu_backward(gradients[0] * saved[1], saved[0]),
            at::silu(saved[0]).mul_(gradients[0])};
  }
};

}  // namespace

at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up) {
  return GatedSilu::apply(gate, up);
}

GatedMlpImpl::GatedMlpImpl(const GatedMlpOptions& o)
    : gate_proj_(register_module(
          "gate_proj", Projection(ProjectionOptions{o.hidden_size, o.intermediate_size, o.bias,
                                                    o.standard_deviation}))),
      up_proj_(register_module(
          "up_proj", Projection(ProjectionOptions{o.hidden_size, o.intermediate_size, o.bias,
                                                  o.standard_deviation}))),
      down_proj_(register_module(
          "down_proj", Projection(ProjectionOptions{o.intermediate_size, o.hidden_size, o.bias,
                                                    o.standard_deviation}))) {}

at::Tensor GatedMlpImpl::forward(const at::Tensor& x) {
  return down_proj_(gated_silu(gate_proj_(x), up_proj_(x)));
}

}  // namespace fsdp::nn
