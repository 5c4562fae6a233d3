#include "fsdp/nn/mamba2.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "fsdp/nn/gated_mlp.h"
#include "fsdp/nn/selective_scan.h"

namespace fsdp::nn {

namespace {

// Steps begin between these, evenly in their logarithms.
constexpr double kFirstStepMin = 0.001;
constexpr double kFirstStepMax = 0.1;

int64_t inner_size(const NemotronHConfig& c) { return c.mamba_num_heads * c.mamba_head_dim; }
int64_t conv_size(const NemotronHConfig& c) {  // x, B and C
  return inner_size(c) + 2 * c.n_groups * c.ssm_state_size;
}

}  // namespace

CausalConvImpl::CausalConvImpl(int64_t num_channels, int64_t kernel_size, bool with_bias)
    : weight(register_parameter("weight", at::empty({num_channels, 1, kernel_size}))) {
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

void CausalConvImpl::reset_parameters() {
  const double bound = 1.0 / std::sqrt(static_cast<double>(weight.size(2)));
  fill_uniform(weight, "weight", bound);
  if (bias.defined()) fill_uniform(bias, "bias", bound);
}

Mamba2Impl::Mamba2Impl(const NemotronHConfig& c)
    : config_(c),
      a_log_(register_parameter("A_log", at::empty({c.mamba_num_heads}))),
      d_(register_parameter("D", at::empty({c.mamba_num_heads}))),
      dt_bias_(register_parameter("dt_bias", at::empty({c.mamba_num_heads}))),
      in_proj_(register_module(
          "in_proj", Projection(ProjectionOptions{c.hidden_size,
                                                  inner_size(c) + conv_size(c) + c.mamba_num_heads,
                                                  c.use_bias, c.initializer_range}))),
      conv1d_(register_module("conv1d", CausalConv(conv_size(c), c.conv_kernel, c.use_conv_bias))),
      norm_(register_module("norm", RmsNorm(inner_size(c), c.layer_norm_epsilon))),
      out_proj_(register_module(
          "out_proj", Projection(ProjectionOptions{inner_size(c), c.hidden_size, c.use_bias,
                                                   c.initializer_range}))) {}

at::Tensor Mamba2Impl::forward(const at::Tensor& x, LayerCache* cache) {
  const NemotronHConfig& c = config_;
  const int64_t batch = x.size(0);
  const int64_t sequence = x.size(1);
  const std::vector<at::Tensor> projected =
      in_proj_(x).split_with_sizes({inner_size(c), conv_size(c), c.mamba_num_heads}, -1);
  const at::Tensor& gate = projected[0];
  const std::vector<at::Tensor> convolved =
      at::silu(conv1d_(projected[1], cache == nullptr ? nullptr : &cache->window))
          .to(at::kFloat)
          .split_with_sizes(
              {inner_size(c), c.n_groups * c.ssm_state_size, c.n_groups * c.ssm_state_size}, -1);
  const at::Tensor step = at::softplus(projected[2].to(at::kFloat) + dt_bias_.to(at::kFloat))
                              .clamp_min(c.time_step_min);
  const auto per_group = [&](const at::Tensor& tensor) {
    return tensor.reshape({batch, sequence, c.n_groups, c.ssm_state_size});
  };
  const at::Tensor y = selective_scan(
      {.x = convolved[0].reshape({batch, sequence, c.mamba_num_heads, c.mamba_head_dim}),
       .step = step,
       .a = a_log_.to(at::kFloat).exp().neg(),
       .b = per_group(convolved[1]),
       .c = per_group(convolved[2]),
       .d = d_.to(at::kFloat)},
      c.chunk_size, cache == nullptr ? nullptr : &cache->state);
  const at::Tensor gated = gated_silu(gate.to(at::kFloat), y.flatten(2));
  return out_proj_(
      rms_norm(gated, norm_->weight, c.layer_norm_epsilon, c.n_groups).to(x.scalar_type()));
}

void Mamba2Impl::reset_parameters() {
  const at::NoGradGuard no_grad;
  const auto on_host = at::device(at::kCPU).dtype(at::kFloat);
  a_log_.copy_(at::arange(1, a_log_.numel() + 1, on_host).log());
  d_.fill_(1.0);
  // softplus(dt_bias) is the step where the input says nothing.
  at::Tensor random = at::empty({dt_bias_.numel()}, on_host);
  fill_uniform(random, "dt_bias", 0.5);
  const double first = std::log(std::max(kFirstStepMin, config_.time_step_min));
  const double last = std::log(kFirstStepMax);
  const at::Tensor step =
      ((random.to(at::kDouble) + 0.5) * std::max(0.0, last - first) + first).exp();
  dt_bias_.copy_(step + (-at::expm1(-step)).log());
}

}  // namespace fsdp::nn
