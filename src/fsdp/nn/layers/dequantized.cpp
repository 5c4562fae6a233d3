#include "fsdp/nn/layers/dequantized.h"

#include <ATen/ATen.h>

#include "fsdp/base/weight_recipe.h"

namespace fsdp::nn {

namespace {

// The numbers of e2m1, by code; the sign is the highest bit of four.
at::Tensor numbers_of_e2m1(const at::Device& device) {
  // Computed there: a copy from the host would wait, and a graph cannot record it.
  const at::Tensor code = at::arange(16, at::TensorOptions().device(device).dtype(at::kInt));
  const at::Tensor mantissa = code.bitwise_and(1).to(at::kFloat);
  const at::Tensor exponent = code.bitwise_right_shift(1).bitwise_and(3);
  const at::Tensor power = at::ones_like(exponent).bitwise_left_shift(exponent).to(at::kFloat);
  const at::Tensor magnitude =
      at::where(exponent.eq(0), mantissa * 0.5, (mantissa * 0.5 + 1.0) * power * 0.5);
  return at::where(code.ge(8), -magnitude, magnitude);
}

at::Tensor wide_codes(const QuantizedWeight& weight) {
  if (weight.recipe != WeightRecipe::kNvFp4) return weight.codes.to(at::kFloat);
  const at::Tensor pairs = weight.codes.to(at::kInt);
  const at::Tensor codes =
      at::stack({pairs.bitwise_and(15), pairs.bitwise_right_shift(4)}, -1).flatten(1);
  return numbers_of_e2m1(codes.device()).index_select(0, codes.flatten()).view(codes.sizes());
}

at::Tensor wide_scales(const QuantizedWeight& weight) {
  if (weight.recipe == WeightRecipe::kMxFp8)
    return weight.scales.view(at::kFloat8_e8m0fnu).to(at::kFloat);
  if (weight.recipe == WeightRecipe::kNvFp4)
    return weight.scales.view(at::kFloat8_e4m3fn).to(at::kFloat) * weight.matrix_scale;
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
  const at::Tensor codes = wide_codes(weight);
  at::Tensor scales = wide_scales(weight);
  scales = repeated(scales, 0, recipe.scale_rows, codes.size(0));
  scales = repeated(scales, 1, recipe.scale_columns, codes.size(1));
  return (codes * scales).to(type);
}

at::Tensor numbers_of(const at::Tensor& parameter) {
  const auto weight = quantized_weight(parameter);
  return weight ? dequantized(*weight, parameter.scalar_type()) : parameter;
}

}  // namespace fsdp::nn
