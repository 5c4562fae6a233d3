#include "fsdp/nn/layers/linear_functions.h"
#include "fsdp/nn/layers/rank_slices.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/nn/layers/weight_products.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- tokens of other ranks -----------------------------------------------------------------------

// Tokens on their way from all ranks: as codes and scales if they are there, else as numbers.
class GatheredTokens {
 public:
  // own: of [batch, sequence / tp]
  GatheredTokens(const LayerInput& own, int64_t batch, Communicator& ranks) {
    const auto gathered = [&](const at::Tensor& rows) {
      return GatheredSlices(rows.view({batch, -1, rows.size(-1)}), 1, ranks);
    };
    if (own.codes.codes.defined()) {
      codes_.emplace(gathered(own.codes.codes.view(at::kByte)));
      scales_.emplace(gathered(own.codes.scales));
    } else {
      numbers_.emplace(gathered(rows_of(own.numbers)));
    }
  }

  // Rows of the whole sequence.
  LayerInput wait() {
    if (numbers_) return {rows_of(numbers_->wait()), {}};
    const at::Tensor codes = rows_of(codes_->wait()).contiguous().view(at::kFloat8_e4m3fn);
    return {{}, {ScaleBlock::kRow, codes, rows_of(scales_->wait()).contiguous()}};
  }

 private:
  std::optional<GatheredSlices> numbers_;
  std::optional<GatheredSlices> codes_;
  std::optional<GatheredSlices> scales_;
};

// --- layers of one input -------------------------------------------------------------------------

// How the layers of one input differ from a single plain one.
struct LinearForm final : torch::CustomClassHolder {
  LinearForm(const MeshAxis* axis, const std::vector<at::Tensor>& all_biases) : tp(axis) {
    for (size_t i = 0; i < all_biases.size(); ++i)
      if (all_biases[i].defined()) with_bias.push_back(i);
  }
  const MeshAxis* tp;             // whose ranks share the tokens; nullptr: all are here
  std::vector<size_t> with_bias;  // the weight of each bias; autograd's lists have no gaps
};
using Form = c10::intrusive_ptr<LinearForm>;

// Saved tensors, in order: the input's numbers, codes, scales (undefined where nobody reads them),
// the weights.
constexpr size_t kFirstWeight = 3;

class Linears final : public torch::autograd::Function<Linears> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               at::TensorList weights, at::TensorList biases, const Form& form) {
    std::vector<int64_t> shape = input.sizes().vec();
    LayerInput own{input, {}};
    LayerInput whole;
    if (form->tp == nullptr) {
      own = whole = layer_input(input, weights);
    } else {
      shape[1] *= form->tp->size();
      if (reads_codes_of_rows(weights, tokens_of(own) * form->tp->size()))
        own.codes = quantize_rows(rows_of(input), ScaleBlock::kRow);
      whole = GatheredTokens(own, shape[0], form->tp->gather()).wait();
      if (whole.numbers.defined()) whole = layer_input(whole.numbers, weights);
    }
    variable_list bias(weights.size());
    for (size_t i = 0; i < biases.size(); ++i) bias[form->with_bias[i]] = biases[i];
    variable_list outputs;
    for (size_t i = 0; i < weights.size(); ++i) {
      shape.back() = weights[i].size(0);
      at::Tensor output = layer_output(whole, weights[i], bias[i]);
      const bool has_shape = output.dim() == static_cast<int64_t>(shape.size());
      outputs.push_back(has_shape ? std::move(output) : output.view(shape));
    }
    const bool may_leave_out = form->tp == nullptr || own.codes.codes.defined();
    save(*context, input, may_leave_out ? kept_input(own, weights) : own, weights, form);
    return outputs;
  }

  // Arguments in order: the input, the weights, the biases, the form.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::TensorList weights = at::TensorList(saved).slice(kFirstWeight);
    const auto form =
        c10::static_intrusive_pointer_cast<LinearForm>(context->saved_data["form"].toCapsule());
    const LayerInput own{
        saved[0],
        {static_cast<ScaleBlock>(context->saved_data["block"].toInt()), saved[1], saved[2]}};
    std::vector<size_t> trained;
    for (size_t i = 0; i < weights.size(); ++i)
      if (context->needs_input_grad(1 + i)) trained.push_back(i);
    std::optional<GatheredTokens> under_way;
    if (form->tp != nullptr && !trained.empty())
      under_way.emplace(own, gradients[0].size(0), form->tp->reduce());
    TransposedInput transposed;
    if (form->tp == nullptr && !trained.empty()) transposed = transposed_input(own, weights);

    const size_t first_bias = 1 + weights.size();
    variable_list result(first_bias + form->with_bias.size() + 1);
    std::vector<at::Tensor> rows;
    for (const at::Tensor& gradient : gradients) rows.push_back(rows_of(gradient));
    OutputGradients of_outputs(rows, weights);
    std::optional<ScatteredSums> own_gradient;
    if (context->needs_input_grad(0)) {
      const bool all_here = form->tp == nullptr && trained.size() == weights.size();
      if (all_here) of_outputs.quantize_for_both(transposed);
      std::vector<int64_t> shape = gradients[0].sizes().vec();
      shape.back() = weights[0].size(1);
      result[0] = of_outputs.input_gradient().view(shape);
      // The part of the tokens' gradient that comes by this rank's outputs.
      if (form->tp != nullptr) own_gradient.emplace(result[0], 1, form->tp->reduce());
    }
    for (size_t i = 0; i < form->with_bias.size(); ++i)
      if (context->needs_input_grad(first_bias + i))
        result[first_bias + i] = rows[form->with_bias[i]].sum(0);
    if (under_way) {
      LayerInput input = under_way->wait();
      if (input.numbers.defined()) input = input_of_gradients(input.numbers, weights);
      transposed = transposed_input(input, weights);
    }
    for (const size_t i : trained) result[1 + i] = of_outputs.weight_gradient(i, transposed);
    if (own_gradient) result[0] = own_gradient->wait();
    return result;
  }

 private:
  static void save(AutogradContext& context, const at::Tensor& input, LayerInput kept,
                   at::TensorList weights, const Form& form) {
    // Tokens travel again in the backward, in one form.
    if (form->tp != nullptr && kept.numbers.defined()) kept.codes = {};
    variable_list saved = {kept.numbers.defined() ? input : at::Tensor(), kept.codes.codes,
                           kept.codes.scales};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context.save_for_backward(std::move(saved));
    context.saved_data["block"] = static_cast<int64_t>(kept.codes.block);
    context.saved_data["form"] = c10::IValue::make_capsule(form);
  }
};

std::vector<at::Tensor> linears(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                                const std::vector<at::Tensor>& biases, const MeshAxis* tp) {
  const auto form = c10::make_intrusive<LinearForm>(tp, biases);
  std::vector<at::Tensor> present;
  for (const size_t i : form->with_bias) present.push_back(biases[i]);
  return Linears::apply(input, at::TensorList(weights), at::TensorList(present), form);
}

// Whether the products of the backward add up the input's gradient as they go.
bool are_summed_by_products(const at::Tensor& input, const std::vector<at::Tensor>& biases) {
  const auto is_absent = [](const at::Tensor& bias) { return !bias.defined(); };
  return input.is_cuda() && std::all_of(biases.begin(), biases.end(), is_absent);
}

// --- rows in groups ------------------------------------------------------------------------------

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

// The weights are those of the groups, one below the other.
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

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  return linears(input, {weight}, {bias}, nullptr).front();
}

std::vector<at::Tensor> linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                               const std::vector<at::Tensor>& biases) {
  if (has_quantized(weights) || are_summed_by_products(input, biases))
    return linears(input, weights, biases, nullptr);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(linear(input, weights[i], biases[i]));
  return outputs;
}

at::Tensor LinearImpl::forward(const at::Tensor& input) { return linear(input, weight, bias); }

std::vector<at::Tensor> gathered_linear(const at::Tensor& own,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases, const MeshAxis& tp) {
  return linears(own, weights, biases, &tp);
}

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
