#include "fsdp/nn/layers/grouped_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/dequantized.h"
#include "fsdp/nn/layers/weight_gradient.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kAlignment = 16;  // bytes, of every row that libtorch's grouped product reads

// libtorch has grouped products of bf16 for these generations alone; elsewhere it loops over the
// groups on the host.
bool device_multiplies_groups(const at::Tensor& rows, std::initializer_list<int64_t> widths) {
  if (!rows.is_cuda() || rows.scalar_type() != at::kBFloat16) return false;
  const int generation = device_generation(rows.device().index());
  const auto is_aligned = [](int64_t width) { return width * 2 % kAlignment == 0; };
  return (generation == 9 || generation == 10) &&
         std::all_of(widths.begin(), widths.end(), is_aligned);
}

at::Tensor matrices_of(const at::Tensor& weight, int64_t num_groups) {
  return weight.view({num_groups, -1, weight.size(1)});
}

// Calls body(group, first row, number of rows).
template <typename Body>
void for_groups(const RowGroups& groups, const Body& body) {
  const auto* ends = groups.on_host.const_data_ptr<int32_t>();
  int64_t begin = 0;
  for (int64_t group = 0; group < groups.on_host.size(0); ++group) {
    body(group, begin, ends[group] - begin);
    begin = ends[group];
  }
}

// rows[group] * matrices[group]
at::Tensor product(const at::Tensor& rows, const at::Tensor& matrices, const RowGroups& groups) {
  if (!groups.on_host.defined()) return at::_grouped_mm(rows, matrices, groups.ends);
  at::Tensor result = at::empty({rows.size(0), matrices.size(2)}, rows.options());
  for_groups(groups, [&](int64_t group, int64_t begin, int64_t count) {
    if (count == 0) return;
    at::Tensor part = result.narrow(0, begin, count);
    at::mm_out(part, rows.narrow(0, begin, count), matrices.select(0, group));
  });
  return result;
}

at::Tensor gradient_of_weight(const at::Tensor& weight, const at::Tensor& gradient,
                              const at::Tensor& rows, const RowGroups& groups) {
  if (!groups.on_host.defined())
    return at::_grouped_mm(gradient.t(), rows, groups.ends).view(weight.sizes());
  WeightGradient result(weight);
  const int64_t out = weight.size(0) / groups.on_host.size(0);
  for_groups(groups, [&](int64_t group, int64_t begin, int64_t count) {
    result.write_rows(group * out, gradient.narrow(0, begin, count).t(),
                      rows.narrow(0, begin, count));
  });
  return result.for_autograd();
}

class GroupedLinear final : public torch::autograd::Function<GroupedLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight, const at::Tensor& ends,
                            const std::optional<at::Tensor>& on_host) {
    context->save_for_backward({rows, weight, ends, on_host.value_or(at::Tensor())});
    const RowGroups groups{ends, on_host.value_or(at::Tensor())};
    return product(rows, matrices_of(numbers_of(weight), ends.size(0)).transpose(1, 2), groups);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor gradient = gradients[0].contiguous();
    const RowGroups groups{saved[2], saved[3]};
    variable_list result(4);
    if (context->needs_input_grad(0))
      result[0] = product(gradient, matrices_of(numbers_of(saved[1]), groups.ends.size(0)), groups);
    if (context->needs_input_grad(1))
      result[1] = gradient_of_weight(saved[1], gradient, saved[0], groups);
    return result;
  }
};

}  // namespace

RowGroups row_groups(const at::Tensor& rows, const at::Tensor& ends,
                     std::initializer_list<int64_t> widths) {
  if (device_multiplies_groups(rows, widths)) return {ends, {}};
  return {ends, ends.to(at::kCPU)};
}

at::Tensor grouped_linear(const at::Tensor& rows, const at::Tensor& weight,
                          const RowGroups& groups) {
  return GroupedLinear::apply(
      rows, weight, groups.ends,
      groups.on_host.defined() ? std::optional(groups.on_host) : std::nullopt);
}

}  // namespace fsdp::nn
