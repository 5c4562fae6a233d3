#include "fsdp/nn/layers/causal_conv.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

namespace fsdp::nn {

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
  const std::optional<at::Tensor> added = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto convolve = [&](const at::Tensor& inputs, int64_t padding) {
    return at::conv1d(inputs.transpose(1, 2), weight, added, /*stride=*/1, padding,
                      /*dilation=*/1, /*groups=*/weight.size(0))
        .narrow(2, 0, x.size(1))
        .transpose(1, 2);
  };
  if (window == nullptr) return convolve(x, before);
  if (!window->defined()) *window = at::zeros({x.size(0), before, x.size(2)}, x.options());
  const at::Tensor inputs = at::cat({*window, x}, 1);
  *window = inputs.narrow(1, x.size(1), before);
  return convolve(inputs, 0);
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
