#include "fsdp/nn/layers/feed_forward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool have_kernels(const at::Tensor& gate, const at::Tensor& up) {
  return has_kernels(gate) && up.scalar_type() == gate.scalar_type() && up.sizes() == gate.sizes();
}

struct GateAndUp {
  at::Tensor gate;
  at::Tensor up;
};

GateAndUp gate_and_up_of(const at::Tensor& first, const at::Tensor& second) {
  if (second.defined()) return {first, second};
  const int64_t size = first.size(-1) / 2;
  return {first.narrow(-1, 0, size), first.narrow(-1, size, size)};
}

// Both dense, or both halves of the same rows.
GatedMemory memory_of(GatedActivation activation, const GateAndUp& inner) {
  const auto& [gate, up] = inner;
  return {.activation = activation,
          .dtype = dtype_of(gate.scalar_type()),
          .numel = gate.numel(),
          .columns = gate.is_contiguous() ? gate.numel() : gate.size(-1),
          .stride = gate.is_contiguous() ? gate.numel() : gate.stride(-2),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr()};
}

// ATen's word for the kind of a GELU.
const char* gelu_kind(GatedActivation activation) {
  return activation == GatedActivation::kGelu ? "none" : "tanh";
}

at::Tensor activated(GatedActivation activation, const at::Tensor& gate) {
  return activation == GatedActivation::kSilu ? at::silu(gate)
                                              : at::gelu(gate, gelu_kind(activation));
}

at::Tensor activated_backward(GatedActivation activation, const at::Tensor& gradient,
                              const at::Tensor& gate) {
  return activation == GatedActivation::kSilu
             ? at::silu_backward(gradient, gate)
             : at::gelu_backward(gradient, gate, gelu_kind(activation));
}

class GatedSilu final : public torch::autograd::Function<GatedSilu> {
 public:
  // `second`: nullopt if `first` has rows of both.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& first,
                            const std::optional<at::Tensor>& second) {
    const GatedInput input(GatedActivation::kSilu, first, second.value_or(at::Tensor()));
    context->save_for_backward({input.first, input.second});
    return gated(input);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto [first, second] =
        gated_backward(GatedInput(GatedActivation::kSilu, saved[0], saved[1]), gradients[0]);
    return {first, second};
  }
};

ProjectionOptions into_mlp(const MlpOptions& o) {
  return {o.hidden_size, o.intermediate_size, o.bias, o.standard_deviation,
          o.is_cut ? ProjectionCut::kOutputs : ProjectionCut::kNone};
}

}  // namespace

GatedInput::GatedInput(GatedActivation activation_in, const at::Tensor& first_in,
                       const at::Tensor& second_in)
    : activation(activation_in), first(first_in), second(second_in) {
  if (second.defined() && !have_kernels(first, second)) return;
  first = first.contiguous();
  if (second.defined()) second = second.contiguous();
}

at::Tensor gated(const GatedInput& input) {
  const GateAndUp inner = gate_and_up_of(input.first, input.second);
  if (!have_kernels(inner.gate, inner.up))
    return activated(input.activation, inner.gate).mul_(inner.up);
  at::Tensor result = at::empty(inner.gate.sizes(), inner.gate.options());
  const OnDeviceOf on_device(inner.gate);
  gated_on_device(memory_of(input.activation, inner), result.mutable_data_ptr(),
                  on_device.stream());
  return result;
}

std::pair<at::Tensor, at::Tensor> gated_backward(const GatedInput& input,
                                                 const at::Tensor& gradient_in) {
  const GateAndUp inner = gate_and_up_of(input.first, input.second);
  const auto& [gate, up] = inner;
  if (!have_kernels(gate, up)) {
    const at::Tensor of_gate = activated_backward(input.activation, gradient_in * up, gate);
    const at::Tensor of_up = activated(input.activation, gate).mul_(gradient_in);
    if (input.second.defined()) return {of_gate, of_up};
    return {at::cat({of_gate, of_up}, -1), at::Tensor()};
  }
  const at::Tensor gradient = gradient_in.contiguous();
  const at::Tensor first = at::empty_like(input.first);
  const at::Tensor second = input.second.defined() ? at::empty_like(input.second) : at::Tensor();
  const auto [of_gate, of_up] = gate_and_up_of(first, second);
  const OnDeviceOf on_device(gate);
  gated_backward_on_device(memory_of(input.activation, inner), gradient.const_data_ptr(),
                           of_gate.mutable_data_ptr(), of_up.mutable_data_ptr(),
                           on_device.stream());
  return {first, second};
}

at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up) {
  return GatedSilu::apply(gate, std::optional(up));
}

at::Tensor gated_silu(const at::Tensor& gate_and_up) {
  return GatedSilu::apply(gate_and_up, std::nullopt);
}

at::Tensor squared_relu(const at::Tensor& x) { return at::relu(x).square(); }

MlpImpl::MlpImpl(const MlpOptions& o) : is_cut_(o.is_cut) {
  if (o.kind == MlpKind::kGatedSilu)
    into_.push_back(register_module("gate_proj", Projection(into_mlp(o))));
  into_.push_back(register_module("up_proj", Projection(into_mlp(o))));
  down_proj_ = register_module(
      "down_proj",
      Projection(ProjectionOptions{o.intermediate_size, o.hidden_size, o.bias, o.standard_deviation,
                                   o.is_cut ? ProjectionCut::kInputs : ProjectionCut::kNone}));
}

at::Tensor MlpImpl::forward(const at::Tensor& own) {
  const std::vector<at::Tensor> inner = project(own, into_, is_cut_ ? tp() : nullptr);
  return down_proj_(inner.size() == 2 ? gated_silu(inner[0], inner[1]) : squared_relu(inner[0]));
}

}  // namespace fsdp::nn
