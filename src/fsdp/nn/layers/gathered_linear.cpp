#include "fsdp/nn/layers/gathered_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/quantized_products.h"
#include "fsdp/nn/layers/rank_slices.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct HeldAxis final : torch::CustomClassHolder {
  explicit HeldAxis(const MeshAxis& held) : axis(held) {}
  const MeshAxis& axis;
};
using Held = c10::intrusive_ptr<HeldAxis>;

at::Tensor token_rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

OutputGradients output_gradients(const variable_list& gradients, at::TensorList weights) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& gradient : gradients) rows.push_back(token_rows(gradient));
  return {rows, weights};
}

// Tokens on their way from all ranks: as codes and scales if they are there, else as numbers.
class GatheredTokens {
 public:
  // own: rows, of [batch, sequence / tp]
  GatheredTokens(const LayerInput& own, int64_t batch, Communicator& ranks) {
    const auto gathered = [&](const at::Tensor& rows) {
      return GatheredSlices(rows.view({batch, -1, rows.size(1)}), 1, ranks);
    };
    if (own.codes.codes.defined()) {
      codes_.emplace(gathered(own.codes.codes.view(at::kByte)));
      scales_.emplace(gathered(own.codes.scales));
    } else {
      numbers_.emplace(gathered(own.numbers));
    }
  }

  // Rows of the whole sequence.
  LayerInput wait() {
    if (numbers_) return {token_rows(numbers_->wait()), {}};
    const at::Tensor codes = token_rows(codes_->wait()).contiguous().view(at::kFloat8_e4m3fn);
    return {{}, {ScaleBlock::kRow, codes, token_rows(scales_->wait()).contiguous()}};
  }

 private:
  std::optional<GatheredSlices> numbers_;
  std::optional<GatheredSlices> codes_;
  std::optional<GatheredSlices> scales_;
};

// What is saved, in order: the own tokens' numbers, codes, scales (undefined where nobody reads
// them), the weights.
constexpr size_t kFirstGatheredWeight = 3;

class GatheredLinears final : public torch::autograd::Function<GatheredLinears> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& own,
                               at::TensorList weights, at::TensorList biases, const Held& held) {
    LayerInput own_input{token_rows(own), {}};
    const int64_t ranks = held->axis.size();
    if (reads_codes_of_rows(weights, own_input.numbers.size(0) * ranks))
      own_input.codes = quantize_rows(own_input.numbers, ScaleBlock::kRow);
    const int64_t batch = own.size(0);
    LayerInput input = GatheredTokens(own_input, batch, held->axis.gather()).wait();
    if (input.numbers.defined()) input = layer_input(input.numbers, weights);
    variable_list outputs;
    for (size_t i = 0; i < weights.size(); ++i)
      outputs.push_back(layer_output(input, weights[i], biases.empty() ? at::Tensor() : biases[i])
                            .view({batch, own.size(1) * ranks, -1}));
    LayerInput kept = own_input.codes.codes.defined() ? kept_input(own_input, weights) : own_input;
    if (kept.numbers.defined()) kept.codes = {};  // one of them travels
    variable_list saved = {kept.numbers.defined() ? own : at::Tensor(), kept.codes.codes,
                           kept.codes.scales};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["axis"] = c10::IValue::make_capsule(held);
    context->saved_data["num_biases"] = static_cast<int64_t>(biases.size());
    return outputs;
  }

  // Arguments in order: the tokens, the weights, the biases, the axis.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Held held =
        c10::static_intrusive_pointer_cast<HeldAxis>(context->saved_data["axis"].toCapsule());
    Communicator& ranks = held->axis.reduce();
    const variable_list saved = context->get_saved_variables();
    const at::TensorList weights = at::TensorList(saved).slice(kFirstGatheredWeight);
    const size_t first_bias = 1 + weights.size();
    const auto num_biases = static_cast<size_t>(context->saved_data["num_biases"].toInt());
    bool has_trained_weight = false;
    for (size_t i = 1; i < first_bias; ++i) has_trained_weight |= context->needs_input_grad(i);

    std::optional<GatheredTokens> whole;
    if (has_trained_weight)
      whole.emplace(LayerInput{saved[0].defined() ? token_rows(saved[0]) : at::Tensor(),
                               {ScaleBlock::kRow, saved[1], saved[2]}},
                    gradients[0].size(0), ranks);
    std::optional<ScatteredSums> own_gradient;
    OutputGradients of_outputs = output_gradients(gradients, weights);
    if (context->needs_input_grad(0))
      // The part of the tokens' gradient that comes by this rank's outputs.
      own_gradient.emplace(
          of_outputs.input_gradient().view({gradients[0].size(0), gradients[0].size(1), -1}), 1,
          ranks);

    variable_list result(first_bias + num_biases + 1);
    for (size_t i = 0; i < num_biases; ++i)
      if (context->needs_input_grad(first_bias + i))
        result[first_bias + i] = token_rows(gradients[i]).sum(0);
    TurnedInput tokens;
    if (whole) {
      LayerInput input = whole->wait();
      if (input.numbers.defined()) input = input_of_gradients(input.numbers, weights);
      tokens = turned_input(input, weights);
    }
    for (size_t i = 0; i < weights.size(); ++i)
      if (context->needs_input_grad(1 + i)) result[1 + i] = of_outputs.weight_gradient(i, tokens);
    if (own_gradient) result[0] = own_gradient->wait();
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> gathered_linear(const at::Tensor& own,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases, const MeshAxis& tp) {
  return GatheredLinears::apply(own, at::TensorList(weights), at::TensorList(biases),
                                c10::make_intrusive<HeldAxis>(tp));
}

}  // namespace fsdp::nn
