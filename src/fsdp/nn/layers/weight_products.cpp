#include "fsdp/nn/layers/weight_products.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "fsdp/base/check.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/nn/kernels/kernel_calls.h"
#include "fsdp/nn/layers/quantized_rows.h"
#include "fsdp/shard/layer_weights.h"

namespace fsdp::nn {

// --- numbers of a weight -------------------------------------------------------------------------

namespace {

at::Tensor wide_scales(const QuantizedWeight& weight) {
  if (weight.recipe == WeightRecipe::kMxFp8)
    return weight.scales.view(at::kFloat8_e8m0fnu).to(at::kFloat);
  return weight.scales;
}

// One scale per `size` elements along a dim of `count`; 0: one for all, which broadcasting repeats.
at::Tensor repeated(const at::Tensor& scales, int64_t dim, int64_t size, int64_t count) {
  if (size <= 1) return scales;
  return scales.repeat_interleave(size, dim).narrow(dim, 0, count);
}

}  // namespace

at::Tensor dequantized(const QuantizedWeight& weight, at::ScalarType type) {
  const WeightRecipeRow& recipe = row_of(weight.recipe);
  const at::Tensor codes = weight.codes.to(at::kFloat);
  at::Tensor scales = wide_scales(weight);
  scales = repeated(scales, 0, recipe.scale_rows, codes.size(0));
  scales = repeated(scales, 1, recipe.scale_columns, codes.size(1));
  return (codes * scales).to(type);
}

at::Tensor numbers_of(const at::Tensor& parameter) {
  const auto weight = quantized_weight(parameter);
  return weight ? dequantized(*weight, parameter.scalar_type()) : parameter;
}

// --- gradients -----------------------------------------------------------------------------------

void write_product(at::Tensor target, const at::Tensor& transposed, const at::Tensor& inputs,
                   ProductUse use) {
  const bool adds = use == ProductUse::kAdded;
  const at::ScalarType type = target.scalar_type();
  const bool widens = type != inputs.scalar_type();
  if (widens && inputs.is_cuda()) {  // the fp32 product of narrow matrices, which GPUs have
    if (adds)
      at::addmm_out(target, target, transposed, inputs, type);
    else
      at::mm_out(target, transposed, inputs, type);
    return;
  }
  const at::Tensor left = widens ? transposed.to(type) : transposed;
  const at::Tensor right = widens ? inputs.to(type) : inputs;
  if (adds)
    target.addmm_(left, right);
  else
    at::mm_out(target, left, right);
}

WeightGradient::WeightGradient(const at::Tensor& weight)
    : target_(direct_gradient(
          weight, weight.is_cuda() ? GradientType::kOrWider : GradientType::kOfParameter)) {
  if (!target_.target.defined()) target_.target = own_ = at::empty_like(weight);
}

void WeightGradient::write_rows(int64_t first, const at::Tensor& transposed,
                                const at::Tensor& inputs) {
  at::Tensor target = target_.target.narrow(0, first, transposed.size(0));
  const bool adds = target_.beta != 0.0;
  if (inputs.size(0) != 0)
    write_product(target, transposed, inputs, adds ? ProductUse::kAdded : ProductUse::kStored);
  else if (!adds)
    target.zero_();
}

void WeightGradient::write(const at::Tensor& values, const at::Tensor& factor) {
  if (target_.beta != 0.0)
    at::addcmul_out(target_.target, target_.target, values, factor);
  else
    at::mul_out(target_.target, values, factor);
}

void WeightGradient::write(const std::function<void(const at::Tensor& to)>& product) {
  const bool adds = target_.beta != 0.0;
  // Products of codes can neither add nor write everywhere.
  if (!adds && begins_a_pack(target_.target)) {
    product(target_.target);
    return;
  }
  const at::Tensor result = at::empty_like(target_.target);
  product(result);
  if (adds)
    target_.target.add_(result);
  else
    target_.target.copy_(result);
}

// --- products ------------------------------------------------------------------------------------

namespace {

// A weight whose products are those of codes.
struct CodeWeight {
  QuantizedWeight weight;
  ScaleBlock block;  // of the activations and gradients that it is multiplied with

  bool has_code_gradient() const { return weight.weight_gradient == ProductForm::kQuantized; }
  // [out] of fp32; undefined where scales are part of products.
  at::Tensor gradient_multipliers() const {
    return block == ScaleBlock::kRow ? weight.scales.flatten() : at::Tensor();
  }
  // [tokens], the same.
  at::Tensor gradient_multipliers(const QuantizedRows& input) const {
    return block == ScaleBlock::kRow ? input.scales.flatten() : at::Tensor();
  }
  // [out, in]
  QuantizedRows rows() const {
    return {block == ScaleBlock::kPiece ? ScaleBlock::kSquare : block, weight.codes, weight.scales};
  }
};

std::optional<ScaleBlock> block_of(WeightRecipe recipe) {
  switch (recipe) {
    case WeightRecipe::kFp8Tensor:
      return ScaleBlock::kMatrix;
    case WeightRecipe::kFp8Row:
      return ScaleBlock::kRow;
    case WeightRecipe::kFp8Block:
      return ScaleBlock::kPiece;
    case WeightRecipe::kPlain:
    case WeightRecipe::kMxFp8:  // scales of a byte need a Blackwell
      break;
  }
  return std::nullopt;
}

// Shapes that cuBLAS multiplies. A CPU takes the same ones: the same numbers.
bool has_shape(const at::Tensor& codes, int64_t tokens, ScaleBlock block) {
  const int64_t multiple = block == ScaleBlock::kPiece ? kScalePiece : kCodeMultiple;
  // cuBLAS reads the tokens' scales of pieces in packs.
  const bool fits_tokens = block != ScaleBlock::kPiece || tokens % kCodeMultiple == 0;
  return codes.size(0) % multiple == 0 && codes.size(1) % multiple == 0 && fits_tokens;
}

// nullopt: numbers are multiplied. Asked for anew in every use, as the memory of codes may have
// moved.
std::optional<CodeWeight> code_weight(const at::Tensor& parameter, int64_t tokens) {
  auto weight = quantized_weight(parameter);
  if (!weight || tokens == 0) return std::nullopt;
  const std::optional<ScaleBlock> block = block_of(weight->recipe);
  if (!block || !has_shape(weight->codes, tokens, *block) || !multiplies_codes(parameter, *block))
    return std::nullopt;
  return CodeWeight{*std::move(weight), *block};
}

// Whether the weight's gradient reads the input's codes of the forward. Not with pieces: those of
// the input lie along the layer's inputs, those of its transposed form along tokens. Scales differ
// within a sum, so they cannot become multipliers, and codes of codes would be rounded twice. So
// the numbers are kept, as without recipes.
bool reuses_codes(const std::optional<CodeWeight>& weight) {
  return weight && weight->has_code_gradient() && weight->block != ScaleBlock::kPiece;
}

}  // namespace

int64_t tokens_of(const LayerInput& input) {
  if (!input.numbers.defined()) return input.codes.codes.size(0);
  return c10::multiply_integers(input.numbers.sizes().slice(0, input.numbers.dim() - 1));
}

bool has_quantized(at::TensorList weights) {
  return std::any_of(weights.begin(), weights.end(),
                     [](const at::Tensor& weight) { return quantized_weight(weight).has_value(); });
}

LayerInput layer_input(const at::Tensor& numbers, at::TensorList weights) {
  LayerInput input{numbers, {}};
  for (const at::Tensor& parameter : weights) {
    const auto weight = code_weight(parameter, tokens_of(input));
    if (!weight) continue;
    if (!input.codes.codes.defined()) input.codes = quantize_rows(rows_of(numbers), weight->block);
    FSDP_CHECK(input.codes.block == weight->block,
               "weights of one input are quantised by different recipes: choose one for all");
  }
  return input;
}

bool reads_codes_of_rows(at::TensorList weights, int64_t num_tokens) {
  return std::all_of(weights.begin(), weights.end(), [&](const at::Tensor& parameter) {
    const auto weight = code_weight(parameter, num_tokens);
    return weight && weight->block == ScaleBlock::kRow;
  });
}

LayerInput kept_input(const LayerInput& input, at::TensorList weights) {
  LayerInput kept;
  for (const at::Tensor& parameter : weights) {
    if (!parameter.requires_grad()) continue;
    if (reuses_codes(code_weight(parameter, tokens_of(input))))
      kept.codes = input.codes;
    else
      kept.numbers = input.numbers;
  }
  return kept;
}

LayerInput input_of_gradients(const at::Tensor& numbers, at::TensorList weights) {
  LayerInput input{numbers, {}};
  for (const at::Tensor& parameter : weights) {
    if (!parameter.requires_grad() || input.codes.codes.defined()) continue;
    const auto weight = code_weight(parameter, tokens_of(input));
    if (reuses_codes(weight)) input.codes = quantize_rows(rows_of(numbers), weight->block);
  }
  return input;
}

at::Tensor layer_output(const LayerInput& input, const at::Tensor& weight, const at::Tensor& bias) {
  const auto codes = code_weight(weight, tokens_of(input));
  if (!codes)
    return at::linear(input.numbers, numbers_of(weight),
                      bias.defined() ? std::optional(bias) : std::nullopt);
  const at::Tensor output = at::empty({tokens_of(input), weight.size(0)}, weight.options());
  multiply_codes(output, {input.codes, codes->rows(), bias, CodeSums::kFast});
  return output;
}

TransposedInput transposed_input(const LayerInput& input, at::TensorList weights) {
  TransposedInput transposed{input, {}};
  for (const at::Tensor& parameter : weights) {
    if (!parameter.requires_grad() || transposed.by_columns.codes.defined()) continue;
    const auto weight = code_weight(parameter, tokens_of(input));
    if (!weight || !weight->has_code_gradient()) continue;
    if (weight->block == ScaleBlock::kPiece)
      transposed.by_columns = quantize_columns(rows_of(input.numbers), ScaleBlock::kPiece);
    else
      transposed.by_columns = {
          weight->block, transposed_codes(input.codes.codes),
          weight->block == ScaleBlock::kMatrix ? input.codes.scales : at::Tensor()};
  }
  return transposed;
}

OutputGradients::OutputGradients(const std::vector<at::Tensor>& gradients, at::TensorList weights) {
  std::optional<size_t> of_rows;  // the group of layers with scales of rows or pieces
  for (size_t i = 0; i < weights.size(); ++i) {
    layers_.push_back({gradients[i], weights[i], {}});
    const auto weight = code_weight(weights[i], gradients[i].size(0));
    if (!weight) {
      plain_.push_back(i);
    } else if (weight->block == ScaleBlock::kMatrix) {
      groups_.push_back({{i}, {}});
    } else {
      if (!of_rows) groups_.push_back({});
      of_rows = of_rows.value_or(groups_.size() - 1);
      groups_[*of_rows].layers.push_back(i);
    }
  }
}

void OutputGradients::quantize_for_both(const TransposedInput& input) {
  for (Group& group : groups_) {
    std::vector<MultipliedColumns> beside;
    std::optional<CodeWeight> weight;
    for (const size_t i : group.layers) {
      weight = code_weight(layers_[i].weight, layers_[i].gradient.size(0));
      if (!weight->has_code_gradient()) break;
      beside.push_back({layers_[i].gradient, weight->gradient_multipliers()});
    }
    if (beside.size() < group.layers.size()) continue;
    TwoForms forms =
        quantize_two_forms(beside, weight->block, weight->gradient_multipliers(input.input.codes));
    group.by_rows = std::move(forms.by_rows);
    for (size_t k = 0; k < group.layers.size(); ++k)
      layers_[group.layers[k]].by_columns = std::move(forms.by_columns[k]);
  }
}

at::Tensor OutputGradients::gradient_by(Group& group) {
  std::vector<MultipliedColumns> beside;
  std::vector<at::Tensor> codes;
  std::vector<at::Tensor> scales;
  ScaleBlock block{};
  for (const size_t i : group.layers) {
    const auto weight = code_weight(layers_[i].weight, layers_[i].gradient.size(0));
    block = weight->block;
    beside.push_back({layers_[i].gradient, weight->gradient_multipliers()});
    codes.push_back(weight->weight.codes);
    scales.push_back(weight->weight.scales);
  }
  if (!group.by_rows.codes.defined()) group.by_rows = quantize_rows(beside, block);
  // [in, out of all]; without scales that are multipliers.
  QuantizedRows transposed{block, transposed_codes(codes), {}};
  if (block == ScaleBlock::kMatrix) transposed.scales = scales.front();
  if (block == ScaleBlock::kPiece) {
    transposed.block = ScaleBlock::kSquare;
    transposed.scales = at::cat(scales, 0).t().contiguous();
  }
  const Layer& first = layers_[group.layers.front()];
  at::Tensor result =
      at::empty({first.gradient.size(0), first.weight.size(1)}, first.gradient.options());
  multiply_codes(result, {group.by_rows, transposed});
  return result;
}

at::Tensor OutputGradients::input_gradient() {
  at::Tensor sum;
  for (Group& group : groups_) {
    const at::Tensor part = gradient_by(group);
    sum = sum.defined() ? sum.add_(part) : part;
  }
  for (const size_t i : plain_) {
    const at::Tensor numbers = numbers_of(layers_[i].weight);
    sum =
        sum.defined() ? sum.addmm_(layers_[i].gradient, numbers) : layers_[i].gradient.mm(numbers);
  }
  return sum;
}

at::Tensor OutputGradients::weight_gradient(size_t weight, const TransposedInput& input) {
  Layer& layer = layers_[weight];
  WeightGradient result(layer.weight);
  const auto codes = code_weight(layer.weight, layer.gradient.size(0));
  if (!codes || !codes->has_code_gradient()) {
    result.write_rows(0, layer.gradient.t(), rows_of(input.input.numbers));
    return result.for_autograd();
  }
  if (!layer.by_columns.codes.defined())
    layer.by_columns = quantize_columns(layer.gradient, codes->block,
                                        codes->gradient_multipliers(input.input.codes));
  result.write([&](const at::Tensor& to) {
    multiply_codes(to, {layer.by_columns, input.by_columns});
  });
  return result.for_autograd();
}

}  // namespace fsdp::nn
