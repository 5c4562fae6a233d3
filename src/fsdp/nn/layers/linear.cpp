#include "fsdp/nn/layers/linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "fsdp/nn/layers/quantized_linear.h"
#include "fsdp/nn/layers/quantized_products.h"
#include "fsdp/nn/layers/weight_gradient.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows_of(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// The gradient, or an undefined tensor after writing it to its slab.
at::Tensor weight_gradient(const at::Tensor& weight, const at::Tensor& output_gradient,
                           const at::Tensor& input) {
  WeightGradient gradient(weight);
  gradient.write_rows(0, rows_of(output_gradient).t(), rows_of(input));
  return gradient.for_autograd();
}

class LinearFunction final : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    context->save_for_backward({input, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return at::linear(input, weight, bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& gradient = gradients[0];
    const variable_list saved = context->get_saved_variables();
    variable_list result(3);
    if (context->needs_input_grad(0)) result[0] = gradient.matmul(saved[1]);
    if (context->needs_input_grad(1)) result[1] = weight_gradient(saved[1], gradient, saved[0]);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2))
      result[2] = rows_of(gradient).sum(0);
    return result;
  }
};

// Weights without biases, on a device.
class LinearsFunction final : public torch::autograd::Function<LinearsFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               at::TensorList weights) {
    variable_list saved = {input};
    variable_list outputs;
    for (const at::Tensor& weight : weights) {
      saved.push_back(weight);
      outputs.push_back(at::linear(input, weight));
    }
    context->save_for_backward(std::move(saved));
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    variable_list result(gradients.size() + 1);
    at::Tensor sum;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& weight = saved[i + 1];
      if (context->needs_input_grad(0)) {
        const at::Tensor rows = rows_of(gradients[i]);
        sum = sum.defined() ? sum.addmm_(rows, weight) : rows.mm(weight);
      }
      if (context->needs_input_grad(i + 1))
        result[i + 1] = weight_gradient(weight, gradients[i], input);
    }
    if (sum.defined()) result[0] = sum.view(input.sizes());
    return result;
  }
};

bool are_summed_by_products(const at::Tensor& input, const std::vector<at::Tensor>& biases) {
  const auto is_absent = [](const at::Tensor& bias) { return !bias.defined(); };
  return input.is_cuda() && std::all_of(biases.begin(), biases.end(), is_absent);
}

}  // namespace

std::vector<at::Tensor> linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                               const std::vector<at::Tensor>& biases) {
  if (has_quantized(weights)) return quantized_linear(input, weights, biases);
  // Autograd finds tensors in a TensorList only.
  if (are_summed_by_products(input, biases))
    return LinearsFunction::apply(input, at::TensorList(weights));
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < weights.size(); ++i)
    outputs.push_back(linear(input, weights[i], biases[i]));
  return outputs;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  if (has_quantized(weight)) return quantized_linear(input, {weight}, {bias}).front();
  // Autograd accepts nullopt for no bias, but not an undefined tensor.
  return LinearFunction::apply(input, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

at::Tensor LinearImpl::forward(const at::Tensor& input) { return linear(input, weight, bias); }

}  // namespace fsdp::nn
