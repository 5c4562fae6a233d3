#include "fsdp/nn/layers/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kNormGrain = 16384;  // elements per task
constexpr int64_t kLanes = 16;

// Sums in lanes, so that it is vectorised and gives the same result on every machine.
template <typename Term>
float lane_sum(int64_t size, const Term& term) {
  std::array<float, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane)
      lanes[static_cast<size_t>(lane)] += term(i + lane);
  for (; i < size; ++i) lanes[static_cast<size_t>(i % kLanes)] += term(i);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

int64_t rows_per_task(int64_t size) { return std::max<int64_t>(1, kNormGrain / size); }

struct Factors {
  const float* weight;
  float added;
  float operator[](int64_t i) const { return added + weight[i]; }
};

void host_backward_row(int64_t size, const float* x, const Factors& w, float s, const float* g,
                       float* dx, float* dw) {
  const float dot = lane_sum(size, [&](int64_t i) { return g[i] * w[i] * x[i]; });
  const float along = s * s * dot / static_cast<float>(size);
  for (int64_t i = 0; i < size; ++i) {
    dx[i] = s * (g[i] * w[i] - x[i] * along);
    dw[i] += g[i] * x[i] * s;
  }
}

// ATen takes six passes on the host, and twice as many in the backward; these take one each.
NormedRows host_norm(const at::Tensor& input, const at::Tensor& weight, const NormForm& form,
                     int64_t num_groups) {
  const int64_t size = input.size(-1) / num_groups;
  const int64_t num_rows = input.numel() / size;
  NormedRows result{at::empty_like(input), at::empty({num_rows}, input.options())};
  const auto* x = input.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  auto* y = result.normed.data_ptr<float>();
  auto* scales = result.scales.data_ptr<float>();
  const auto added = static_cast<float>(form.offset);
  at::parallel_for(0, num_rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x_row = x + row * size;
      float* y_row = y + row * size;
      const float* w_row = w + row % num_groups * size;
      const float squares = lane_sum(size, [&](int64_t i) { return x_row[i] * x_row[i]; });
      const float s =
          1.0f / std::sqrt(squares / static_cast<float>(size) + static_cast<float>(form.eps));
      scales[row] = s;
      for (int64_t i = 0; i < size; ++i) y_row[i] = x_row[i] * s * (added + w_row[i]);
    }
  });
  return result;
}

NormedRowsGradients host_norm_backward(const at::Tensor& gradient, const at::Tensor& input,
                                       const at::Tensor& weight, const at::Tensor& scale,
                                       double offset, int64_t num_groups) {
  const int64_t width = input.size(-1);
  const int64_t size = width / num_groups;
  const int64_t num_rows = input.numel() / size;
  const int64_t rows_at_once = rows_per_task(size);
  const int64_t num_tasks = (num_rows + rows_at_once - 1) / rows_at_once;
  const at::Tensor input_gradient = at::empty_like(input);
  // One row of partial sums per task, so that the number of threads does not change the sums.
  const at::Tensor partial = at::zeros({num_tasks, width}, input.options());
  const auto* x = input.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  const auto* scales = scale.const_data_ptr<float>();
  const auto* g = gradient.const_data_ptr<float>();
  auto* dx = input_gradient.data_ptr<float>();
  auto* dw = partial.data_ptr<float>();
  const auto added = static_cast<float>(offset);
  at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      for (int64_t row = task * rows_at_once; row < std::min(num_rows, (task + 1) * rows_at_once);
           ++row) {
        const int64_t group = row % num_groups * size;
        host_backward_row(size, x + row * size, {w + group, added}, scales[row], g + row * size,
                          dx + row * size, dw + task * width + group);
      }
  });
  return {input_gradient, num_tasks == 1 ? partial.view({width}) : partial.sum(0)};
}

// Factors are offset + weight.
class HostRmsNorm final : public torch::autograd::Function<HostRmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input_in,
                            const at::Tensor& weight, double offset, double eps,
                            int64_t num_groups) {
    const at::Tensor input = input_in.contiguous();
    const NormedRows result = host_norm(input, weight, {eps, offset}, num_groups);
    context->save_for_backward({input, weight, result.scales});
    context->saved_data["num_groups"] = num_groups;
    context->saved_data["offset"] = offset;
    return result.normed;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto [of_input, of_weight] = host_norm_backward(
        gradients[0].contiguous(), saved[0], saved[1], saved[2],
        context->saved_data["offset"].toDouble(), context->saved_data["num_groups"].toInt());
    return {of_input, of_weight, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

bool has_norm_kernel(const at::Tensor& input, const at::Tensor& weight) {
  return has_kernels(input) && weight.scalar_type() == input.scalar_type() &&
         norm_fits_device(dtype_of(input.scalar_type()), input.size(-1));
}

NormInput input_of(const at::Tensor& x, const at::Tensor& weight, const NormForm& form) {
  return {.dtype = dtype_of(x.scalar_type()),
          .num_rows = x.numel() / x.size(-1),
          .size = x.size(-1),
          .eps = static_cast<float>(form.eps),
          .x = x.const_data_ptr(),
          .weight = weight.const_data_ptr(),
          .weight_offset = static_cast<float>(form.offset)};
}

// `sum`: undefined, or the place of x + added. All dense.
NormedRows device_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight,
                       const NormForm& form, const at::Tensor& sum) {
  NormInput input = input_of(x, weight, form);
  NormedRows result{at::empty_like(x), at::empty({input.num_rows}, x.options().dtype(at::kFloat))};
  NormOutput output{.normed = result.normed.mutable_data_ptr(),
                    .scales = result.scales.mutable_data_ptr<float>()};
  if (sum.defined()) {
    input.added = added.const_data_ptr();
    output.sum = sum.mutable_data_ptr();
  }
  const OnDeviceOf on_device(x);
  rms_norm_on_device(input, output, on_device.stream());
  return result;
}

// `of_sum`: undefined, or the gradient of x itself, which is added.
NormedRowsGradients device_norm_backward(const at::Tensor& of_normed_in,
                                         const at::Tensor& of_sum_in, const at::Tensor& x_in,
                                         const at::Tensor& weight, const at::Tensor& scales,
                                         const NormForm& form) {
  const at::Tensor x = dense_packs(x_in);
  const NormInput input = input_of(x, weight, form);
  const at::Tensor of_normed = dense_packs(of_normed_in);
  const at::Tensor of_sum = of_sum_in.defined() ? dense_packs(of_sum_in) : at::Tensor();
  NormedRowsGradients result{at::empty_like(x), at::empty_like(weight)};
  const at::Tensor weight_sums =
      at::empty({norm_weight_sums(input.num_rows), input.size}, x.options().dtype(at::kFloat));
  const OnDeviceOf on_device(x);
  rms_norm_backward_on_device(input,
                              {.scales = scales.const_data_ptr<float>(),
                               .of_normed = of_normed.const_data_ptr(),
                               .of_sum = of_sum.defined() ? of_sum.const_data_ptr() : nullptr,
                               .of_x = result.of_x.mutable_data_ptr(),
                               .of_weight = result.of_weight.mutable_data_ptr(),
                               .weight_sums = weight_sums.mutable_data_ptr<float>()},
                              on_device.stream());
  return result;
}

// {x + added, or x if nothing is added; the same normed}
class DeviceRmsNorm final : public torch::autograd::Function<DeviceRmsNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_in,
                               const std::optional<at::Tensor>& added_in,
                               const at::Tensor& weight_in, double offset, double eps) {
    const at::Tensor x = dense_packs(x_in);
    const at::Tensor weight = dense_packs(weight_in);
    const at::Tensor added = added_in ? dense_packs(*added_in) : at::Tensor();
    const at::Tensor sum = added_in ? at::empty_like(x) : at::Tensor();
    const NormedRows result = device_norm(x, added, weight, {eps, offset}, sum);
    context->save_for_backward({added_in ? sum : x, weight, result.scales});
    context->saved_data["offset"] = offset;
    context->saved_data["eps"] = eps;
    context->saved_data["has_added"] = added_in.has_value();
    context->set_materialize_grads(false);
    return {added_in ? sum : x_in, result.normed};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& of_around = gradients[0];
    const bool has_added = context->saved_data["has_added"].toBool();
    const auto result = [&](const at::Tensor& of_x, const at::Tensor& of_weight) {
      return variable_list{of_x, has_added ? of_x : at::Tensor(), of_weight, at::Tensor(),
                           at::Tensor()};
    };
    if (!gradients[1].defined()) return result(of_around, at::Tensor());
    const variable_list saved = context->get_saved_variables();
    const auto [of_x, of_weight] =
        device_norm_backward(gradients[1], of_around, saved[0], saved[1], saved[2],
                             {.eps = context->saved_data["eps"].toDouble(),
                              .offset = context->saved_data["offset"].toDouble()});
    return result(of_x, of_weight);
  }
};

NormedBranch branch_on_device(const at::Tensor& x, const std::optional<at::Tensor>& added,
                              const at::Tensor& weight, double offset, double eps) {
  const variable_list result = DeviceRmsNorm::apply(x, added, weight, offset, eps);
  return {result[0], result[1]};
}

bool is_plain(const at::Tensor& input, const at::Tensor& weight) {
  return input.device().is_cpu() && input.scalar_type() == at::kFloat &&
         weight.scalar_type() == at::kFloat && input.numel() > 0;
}

at::Tensor norm_with_offset(const at::Tensor& input, const at::Tensor& weight, double offset,
                            double eps, int64_t num_groups) {
  if (is_plain(input, weight)) return HostRmsNorm::apply(input, weight, offset, eps, num_groups);
  if (num_groups == 1 && has_norm_kernel(input, weight))
    return branch_on_device(input, std::nullopt, weight, offset, eps).normed;
  if (offset != 0.0) {  // a narrow type would round the sum
    const at::ScalarType wide = at::promote_types(input.scalar_type(), at::kFloat);
    return norm_with_offset(input.to(wide), weight.to(wide) + offset, 0.0, eps, num_groups)
        .to(input.scalar_type());
  }
  if (num_groups == 1) return at::rms_norm(input, weight.sizes(), weight, eps);
  const std::vector<int64_t> group = {input.size(-1) / num_groups};
  const at::Tensor grouped = input.unflatten(-1, {num_groups, group[0]});
  return (at::rms_norm(grouped, group, {}, eps) * weight.view({num_groups, group[0]}))
      .flatten(-2)
      .to(input.scalar_type());
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps,
                    int64_t num_groups) {
  return norm_with_offset(input, weight, 0.0, eps, num_groups);
}

NormedRows normed_rows(const at::Tensor& x, const at::Tensor& weight, const NormForm& form) {
  if (is_plain(x, weight)) return host_norm(x.contiguous(), weight, form, 1);
  if (has_norm_kernel(x, weight))
    return device_norm(dense_packs(x), {}, dense_packs(weight), form, {});
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor scale = wide.square().mean(-1, /*keepdim=*/true).add_(form.eps).rsqrt_();
  const at::Tensor factors = weight.to(at::kFloat) + form.offset;
  return {(wide * scale).mul_(factors).to(x.scalar_type()), scale.reshape({-1})};
}

NormedRowsGradients normed_rows_backward(const at::Tensor& gradient, const at::Tensor& x,
                                         const at::Tensor& weight, const at::Tensor& scales,
                                         const NormForm& form) {
  if (is_plain(x, weight))
    return host_norm_backward(gradient.contiguous(), x.contiguous(), weight, scales, form.offset,
                              1);
  if (has_norm_kernel(x, weight))
    return device_norm_backward(gradient, {}, x, dense_packs(weight), scales, form);
  const at::Tensor rows = x.to(at::kFloat).reshape({-1, x.size(-1)});
  const at::Tensor of_rows = gradient.to(at::kFloat).reshape(rows.sizes());
  const at::Tensor scale = scales.unsqueeze(1);
  const at::Tensor of_scaled = of_rows * (weight.to(at::kFloat) + form.offset);
  const at::Tensor along = (of_scaled * rows).mean(1, /*keepdim=*/true) * scale.square();
  return {((of_scaled - rows * along) * scale).reshape(x.sizes()).to(x.scalar_type()),
          (of_rows * rows * scale).sum(0).to(weight.scalar_type())};
}

RmsNormImpl::RmsNormImpl(int64_t size, double eps, NormWeight form, TpPlacement placement)
    : weight(register_parameter("weight", at::empty({size}))),
      eps_(eps),
      placement_(std::move(placement)),
      offset_(form == NormWeight::kZeroCentred ? 1.0 : 0.0) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& input) {
  return norm_with_offset(input, weight, offset_, eps_, /*num_groups=*/1);
}

NormedBranch RmsNormImpl::branch(const at::Tensor& x, const at::Tensor& added) {
  const bool fits =
      !added.defined() || (added.scalar_type() == x.scalar_type() && added.sizes() == x.sizes());
  if (fits && has_norm_kernel(x, weight))
    return branch_on_device(x, added.defined() ? std::optional(added) : std::nullopt, weight,
                            offset_, eps_);
  const at::Tensor sum = added.defined() ? x + added : x;
  return {sum, forward(sum)};
}

void RmsNormImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  weight.fill_(1.0 - offset_);
}

}  // namespace fsdp::nn
