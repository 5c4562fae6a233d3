#include "fsdp/nn/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kGrain = 16384;  // elements per task
constexpr int64_t kLanes = 16;

// A sum in lanes, so that it is vectorised without changing what is computed from machine to
// machine.
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

int64_t rows_per_task(int64_t size) { return std::max<int64_t>(1, kGrain / size); }

// ATen's own takes six passes on the host, and twice that in the backward; these take one each.
class HostRmsNorm final : public torch::autograd::Function<HostRmsNorm> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input_in,
                            const at::Tensor& weight, double eps, int64_t num_groups) {
    const at::Tensor input = input_in.contiguous();
    const int64_t size = input.size(-1) / num_groups;
    const int64_t num_rows = input.numel() / size;
    const at::Tensor output = at::empty_like(input);
    const at::Tensor scale = at::empty({num_rows}, input.options());
    const auto* x = input.const_data_ptr<float>();
    const auto* w = weight.const_data_ptr<float>();
    auto* y = output.data_ptr<float>();
    auto* scales = scale.data_ptr<float>();
    at::parallel_for(0, num_rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* x_row = x + row * size;
        float* y_row = y + row * size;
        const float* w_row = w + row % num_groups * size;
        const float squares = lane_sum(size, [&](int64_t i) { return x_row[i] * x_row[i]; });
        const float s =
            1.0f / std::sqrt(squares / static_cast<float>(size) + static_cast<float>(eps));
        scales[row] = s;
        for (int64_t i = 0; i < size; ++i) y_row[i] = x_row[i] * s * w_row[i];
      }
    });
    context->save_for_backward({input, weight, scale});
    context->saved_data["num_groups"] = num_groups;
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor gradient = gradients[0].contiguous();
    const int64_t num_groups = context->saved_data["num_groups"].toInt();
    const int64_t width = saved[0].size(-1);
    const int64_t size = width / num_groups;
    const int64_t num_rows = saved[0].numel() / size;
    const int64_t rows_at_once = rows_per_task(size);
    const int64_t num_tasks = (num_rows + rows_at_once - 1) / rows_at_once;
    const at::Tensor input_gradient = at::empty_like(saved[0]);
    // One row of partial sums per task: the same sums for any number of threads.
    const at::Tensor partial = at::zeros({num_tasks, width}, saved[0].options());
    const auto* x = saved[0].const_data_ptr<float>();
    const auto* w = saved[1].const_data_ptr<float>();
    const auto* scales = saved[2].const_data_ptr<float>();
    const auto* g = gradient.const_data_ptr<float>();
    auto* dx = input_gradient.data_ptr<float>();
    auto* dw = partial.data_ptr<float>();
    at::parallel_for(0, num_tasks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        for (int64_t row = task * rows_at_once; row < std::min(num_rows, (task + 1) * rows_at_once);
             ++row) {
          const int64_t group = row % num_groups * size;
          backward_row(size, x + row * size, w + group, scales[row], g + row * size,
                       dx + row * size, dw + task * width + group);
        }
    });
    return {input_gradient, num_tasks == 1 ? partial.view({width}) : partial.sum(0), at::Tensor(),
            at::Tensor()};
  }

 private:
  static void backward_row(int64_t size, const float* x, const float* w, float s, const float* g,
                           float* dx, float* dw) {
    const float dot = lane_sum(size, [&](int64_t i) { return g[i] * w[i] * x[i]; });
    const float along = s * s * dot / static_cast<float>(size);
    for (int64_t i = 0; i < size; ++i) {
      dx[i] = s * (g[i] * w[i] - x[i] * along);
      dw[i] += g[i] * x[i] * s;
    }
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps,
                    int64_t num_groups) {
  const bool is_plain = input.device().is_cpu() && input.scalar_type() == at::kFloat &&
                        weight.scalar_type() == at::kFloat && input.numel() > 0;
  if (is_plain) return HostRmsNorm::apply(input, weight, eps, num_groups);
  if (num_groups == 1) return at::rms_norm(input, weight.sizes(), weight, eps);
  const std::vector<int64_t> group = {input.size(-1) / num_groups};
  const at::Tensor grouped = input.unflatten(-1, {num_groups, group[0]});
  return (at::rms_norm(grouped, group, {}, eps) * weight.view({num_groups, group[0]}))
      .flatten(-2)
      .to(input.scalar_type());
}

RmsNormImpl::RmsNormImpl(int64_t size, double eps)
    : weight(register_parameter("weight", at::empty({size}))), eps_(eps) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& input) { return rms_norm(input, weight, eps_); }

void RmsNormImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  weight.fill_(1.0);
}

}  // namespace fsdp::nn
