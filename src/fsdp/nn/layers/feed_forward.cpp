#include "fsdp/nn/layers/feed_forward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

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

class GatedSilu final : public torch::autograd::Function<GatedSilu> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate_in,
                            const at::Tensor& up_in) {
    if (!have_kernels(gate_in, up_in)) {
      context->save_for_backward({gate_in, up_in});
      return at::silu(gate_in).mul_(up_in);
    }
    const at::Tensor gate = gate_in.contiguous();
    const at::Tensor up = up_in.contiguous();
    context->save_for_backward({gate, up});
    at::Tensor result = at::empty_like(gate);
    const OnDeviceOf on_device(gate);
    gated_silu_on_device(memory_of(gate, up), result.mutable_data_ptr(), on_device.stream());
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    if (have_kernels(saved[0], saved[1])) return by_kernel(saved[0], saved[1], gradients[0]);
    return {at::silu_backward(gradients[0] * saved[1], saved[0]),
            at::silu(saved[0]).mul_(gradients[0])};
  }

 private:
  static variable_list by_kernel(const at::Tensor& gate, const at::Tensor& up,
                                 const at::Tensor& gradient_in) {
    const at::Tensor gradient = gradient_in.contiguous();
    at::Tensor gate_gradient = at::empty_like(gate);
    at::Tensor up_gradient = at::empty_like(up);
    const OnDeviceOf on_device(gate);
    gated_silu_backward_on_device(memory_of(gate, up), gradient.const_data_ptr(),
                                  gate_gradient.mutable_data_ptr(), up_gradient.mutable_data_ptr(),
                                  on_device.stream());
    return {gate_gradient, up_gradient};
  }
};

at::Tensor half_of(const at::Tensor& rows, int64_t half) {
  const int64_t size = rows.size(1) / 2;
  return rows.narrow(1, half * size, size);
}

class GatedSiluOfRows final : public torch::autograd::Function<GatedSiluOfRows> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows_in) {
    const at::Tensor rows = rows_in.contiguous();
    context->save_for_backward({rows});
    const at::Tensor gate = half_of(rows, 0);
    const at::Tensor up = half_of(rows, 1);
    if (!has_kernels(rows)) return at::silu(gate).mul_(up);
    at::Tensor result = at::empty(gate.sizes(), gate.options());
    const OnDeviceOf on_device(rows);
    gated_silu_on_device(memory_of(gate, up), result.mutable_data_ptr(), on_device.stream());
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor rows = context->get_saved_variables()[0];
    const at::Tensor gradient = gradients[0].contiguous();
    const at::Tensor gate = half_of(rows, 0);
    const at::Tensor up = half_of(rows, 1);
    at::Tensor result = at::empty_like(rows);
    at::Tensor of_gate = half_of(result, 0);
    at::Tensor of_up = half_of(result, 1);
    if (has_kernels(rows)) {
      const OnDeviceOf on_device(rows);
      gated_silu_backward_on_device(memory_of(gate, up), gradient.const_data_ptr(),
                                    of_gate.mutable_data_ptr(), of_up.mutable_data_ptr(),
                                    on_device.stream());
    } else {
      of_gate.copy_(at::silu_backward(gradient * up, gate));
      of_up.copy_(at::silu(gate).mul_(gradient));
    }
    return {result};
  }
};

ProjectionOptions into_mlp(const MlpOptions& o) {
  return {o.hidden_size, o.intermediate_size, o.bias, o.standard_deviation,
          o.is_cut ? ProjectionCut::kOutputs : ProjectionCut::kNone};
}

}  // namespace

at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up) {
  return GatedSilu::apply(gate, up);
}

at::Tensor gated_silu(const at::Tensor& gate_and_up) { return GatedSiluOfRows::apply(gate_and_up); }

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
