#include "fsdp/nn/layers/causal_conv.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// On a CPU at::conv1d is no choice: on some Arm processors oneDNN keeps one copy of a depthwise
// convolution's weights for all threads, and ranks that are threads compute with each other's.
class SumOfTaps final : public torch::autograd::Function<SumOfTaps> {
 public:
  // inputs: [batch, sequence + kernel_size - 1, channels]; taps: [channels, kernel_size].
  static at::Tensor forward(AutogradContext* context, const at::Tensor& inputs,
                            const at::Tensor& taps) {
    context->save_for_backward({inputs, taps});
    const int64_t sequence = inputs.size(1) - taps.size(1) + 1;
    const at::Tensor sum = inputs.narrow(1, 0, sequence) * taps.select(1, 0);
    for (int64_t k = 1; k < taps.size(1); ++k)
      sum.addcmul_(inputs.narrow(1, k, sequence), taps.select(1, k));
    return sum;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& inputs = saved[0];
    const at::Tensor& taps = saved[1];
    const int64_t sequence = gradients[0].size(1);
    variable_list result = {at::zeros_like(inputs), at::empty_like(taps)};
    for (int64_t k = 0; k < taps.size(1); ++k) {
      result[0].narrow(1, k, sequence).addcmul_(gradients[0], taps.select(1, k));
      result[1].select(1, k).copy_(
          (gradients[0] * inputs.narrow(1, k, sequence)).sum(at::IntArrayRef({0, 1})));
    }
    return result;
  }
};

// inputs: [batch, before + sequence, channels] with the kernel_size - 1 positions before.
at::Tensor convolved_on_cpu(const at::Tensor& inputs, const at::Tensor& weight,
                            const at::Tensor& bias) {
  const at::ScalarType type = inputs.scalar_type();
  const at::ScalarType wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor sum = SumOfTaps::apply(inputs.to(wide), weight.squeeze(1).to(wide));
  return (bias.defined() ? sum + bias.to(wide) : sum).to(type);
}

// `padding` positions of zeros come before the inputs, and after them.
at::Tensor convolved_on_device(const at::Tensor& inputs, const at::Tensor& weight,
                               const at::Tensor& bias, int64_t padding) {
  return at::conv1d(inputs.transpose(1, 2), weight,
                    bias.defined() ? std::optional(bias) : std::nullopt, /*stride=*/1, padding,
                    /*dilation=*/1, /*groups=*/weight.size(0))
      .transpose(1, 2);
}

}  // namespace

CausalConvImpl::CausalConvImpl(std::vector<int64_t> section_sizes, int64_t kernel_size,
                               bool with_bias)
    : section_sizes_(std::move(section_sizes)) {
  const int64_t num_channels =
      std::accumulate(section_sizes_.begin(), section_sizes_.end(), int64_t{0});
  weight = register_parameter("weight", at::empty({num_channels, 1, kernel_size}));
  if (with_bias) bias = register_parameter("bias", at::empty({num_channels}));
}

at::Tensor CausalConvImpl::forward(const at::Tensor& x, at::Tensor* window) {
  const int64_t before = weight.size(2) - 1;
  if (window == nullptr)
    return x.is_cpu() ? convolved_on_cpu(at::constant_pad_nd(x, {0, 0, before, 0}), weight, bias)
                      : convolved_on_device(x, weight, bias, before).narrow(1, 0, x.size(1));
  if (!window->defined()) *window = at::zeros({x.size(0), before, x.size(2)}, x.options());
  const at::Tensor inputs = at::cat({*window, x}, 1);
  *window = inputs.narrow(1, x.size(1), before);
  return x.is_cpu() ? convolved_on_cpu(inputs, weight, bias)
                    : convolved_on_device(inputs, weight, bias, 0);
}

TpPlacement CausalConvImpl::tp_placement(const std::string&) const {
  return TpShard{.dim = 0, .section_sizes = section_sizes_};
}

void CausalConvImpl::reset_parameters() {
  const double bound = 1.0 / std::sqrt(static_cast<double>(weight.size(2)));
  fill_uniform(weight, "weight", bound);
  if (bias.defined()) fill_uniform(bias, "bias", bound);
}

}  // namespace fsdp::nn
