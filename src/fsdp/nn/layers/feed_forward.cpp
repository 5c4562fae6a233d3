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

// Both dense, or both halves of the same rows.
GatedSiluMemory memory_of(const at::Tensor& gate, const at::Tensor& up) {
  return {.dtype = dtype_of(gate.scalar_type()),
          .numel = gate.numel(),
          .columns = gate.is_contiguous() ? gate.numel() : gate.size(-1),
          .stride = gate.is_contiguous() ? gate.numel() : gate.stride(-2),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr()};
}

// Two tensors, or the halves of the rows of one.
struct GateAndUp {
  at::Tensor gate;
  at::Tensor up;
};

GateAndUp gate_and_up_of(const at::Tensor& first, const at::Tensor& second) {
  if (second.defined()) return {first, second};
  const int64_t size = first.size(-1) / 2;
  return {first.narrow(-1, 0, size), first.narrow(-1, size, size)};
}

class GatedSilu final : public torch::autograd::Function<GatedSilu> {
 public:
  // `second`: nullopt if `first` has rows of both.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& first_in,
                            const std::optional<at::Tensor>& second_in) {
    const bool is_dense = !second_in || have_kernels(first_in, *second_in);
    const at::Tensor first = is_dense ? first_in.contiguous() : first_in;
    at::Tensor second;
    if (second_in) second = is_dense ? second_in->contiguous() : *second_in;
    context->save_for_backward({first, second});
    const auto [gate, up] = gate_and_up_of(first, second);
    if (!have_kernels(gate, up)) return at::silu(gate).mul_(up);
    at::Tensor result = at::empty(gate.sizes(), gate.options());
    const OnDeviceOf on_device(gate);
    gated_silu_on_device(memory_of(gate, up), result.mutable_data_ptr(), on_device.stream());
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const bool has_two = saved[1].defined();
    const auto [gate, up] = gate_and_up_of(saved[0], saved[1]);
    if (!have_kernels(gate, up)) {
      const at::Tensor of_gate = at::silu_backward(gradients[0] * up, gate);
      const at::Tensor of_up = at::silu(gate).mul_(gradients[0]);
      if (has_two) return {of_gate, of_up};
      return {at::cat({of_gate, of_up}, -1), at::Tensor()};
    }
    const at::Tensor gradient = gradients[0].contiguous();
    const at::Tensor first = at::empty_like(saved[0]);
    const at::Tensor second = has_two ? at::empty_like(saved[1]) : at::Tensor();
    const auto [of_gate, of_up] = gate_and_up_of(first, second);
    const OnDeviceOf on_device(gate);
    gated_silu_backward_on_device(memory_of(gate, up), gradient.const_data_ptr(),
                                  of_gate.mutable_data_ptr(), of_up.mutable_data_ptr(),
                                  on_device.stream());
    return {first, second};
  }
};

ProjectionOptions into_mlp(const MlpOptions& o) {
  return {o.hidden_size, o.intermediate_size, o.bias, o.standard_deviation,
          o.is_cut ? ProjectionCut::kOutputs : ProjectionCut::kNone};
}

}  // namespace

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
