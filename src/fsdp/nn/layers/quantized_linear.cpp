#include "fsdp/nn/layers/quantized_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fsdp/nn/layers/quantized_products.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor as_rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// Which of the weights have biases. Autograd finds tensors in lists only, which have no gaps.
std::vector<int64_t> indices_of_present(const std::vector<at::Tensor>& biases) {
  std::vector<int64_t> result;
  for (size_t i = 0; i < biases.size(); ++i)
    if (biases[i].defined()) result.push_back(static_cast<int64_t>(i));
  return result;
}

// What is saved, in order: the input's numbers, codes, scales (undefined where nobody reads them),
// the weights.
constexpr size_t kFirstWeight = 3;

class QuantizedLinears final : public torch::autograd::Function<QuantizedLinears> {
 public:
  // with_bias: the weight of each bias
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               at::TensorList weights, at::TensorList biases,
                               const std::vector<int64_t>& with_bias) {
    const LayerInput rows = layer_input(as_rows(input), weights);
    variable_list bias(weights.size());
    for (size_t i = 0; i < biases.size(); ++i) bias[static_cast<size_t>(with_bias[i])] = biases[i];
    std::vector<int64_t> shape = input.sizes().vec();
    variable_list outputs;
    for (size_t i = 0; i < weights.size(); ++i) {
      shape.back() = weights[i].size(0);
      outputs.push_back(layer_output(rows, weights[i], bias[i]).view(shape));
    }
    const LayerInput kept = kept_input(rows, weights);
    variable_list saved = {kept.numbers.defined() ? input : at::Tensor(), kept.codes.codes,
                           kept.codes.scales};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["block"] = static_cast<int64_t>(kept.codes.block);
    context->saved_data["shape"] = input.sizes().vec();
    context->saved_data["with_bias"] = with_bias;
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::TensorList weights = at::TensorList(saved).slice(kFirstWeight);
    const LayerInput kept{
        saved[0].defined() ? as_rows(saved[0]) : at::Tensor(),
        {static_cast<ScaleBlock>(context->saved_data["block"].toInt()), saved[1], saved[2]}};
    std::vector<size_t> trained;
    for (size_t i = 0; i < weights.size(); ++i)
      if (context->needs_input_grad(1 + i)) trained.push_back(i);
    const bool wants_input = context->needs_input_grad(0);
    const TurnedInput turned = trained.empty() ? TurnedInput{} : turned_input(kept, weights);

    const std::vector<int64_t> with_bias = context->saved_data["with_bias"].toIntVector();
    const size_t first_bias = 1 + weights.size();
    variable_list result(first_bias + with_bias.size() + 1);
    std::vector<at::Tensor> rows;
    for (const at::Tensor& gradient : gradients) rows.push_back(as_rows(gradient));
    OutputGradients of_outputs(rows, weights);
    if (wants_input && trained.size() == weights.size()) of_outputs.quantize_for_both(turned);
    if (wants_input)
      result[0] = of_outputs.input_gradient().view(context->saved_data["shape"].toIntVector());
    for (const size_t i : trained) result[1 + i] = of_outputs.weight_gradient(i, turned);
    for (size_t i = 0; i < with_bias.size(); ++i)
      if (context->needs_input_grad(first_bias + i))
        result[first_bias + i] = as_rows(gradients[static_cast<size_t>(with_bias[i])]).sum(0);
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> quantized_linear(const at::Tensor& input,
                                         const std::vector<at::Tensor>& weights,
                                         const std::vector<at::Tensor>& biases) {
  std::vector<at::Tensor> present;
  for (const at::Tensor& bias : biases)
    if (bias.defined()) present.push_back(bias);
  return QuantizedLinears::apply(input, at::TensorList(weights), at::TensorList(present),
                                 indices_of_present(biases));
}

}  // namespace fsdp::nn
