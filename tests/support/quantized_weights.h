// Quantised matrices by plain loops, and parameters of such.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/shard/group/quantized_weights.h"
#include "support/reference_quantizer.h"

namespace fsdp::testing::of_codes {

inline int64_t ceil_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Blocks of [rows, columns] numbers; 0: all of them.
struct BlockSize {
  int64_t rows = 0;
  int64_t columns = 0;
};

struct Codes {
  at::Tensor bytes;    // of the codes
  at::Tensor scales;   // one per block
  at::Tensor values;   // what they say, in fp64
  at::Tensor numbers;  // the codes alone, in fp64
};

// `least`: the largest magnitude that smaller blocks are taken to have.
inline Codes quantized(const at::Tensor& numbers, BlockSize block, float least = 0x1p-116f) {
  const at::Tensor x = numbers.to(at::kFloat).contiguous();
  const int64_t height = block.rows == 0 ? x.size(0) : block.rows;
  const int64_t width = block.columns == 0 ? x.size(1) : block.columns;
  Codes result{at::empty(x.sizes(), at::kByte),
               at::empty({ceil_of(x.size(0), height), ceil_of(x.size(1), width)}),
               at::empty(x.sizes(), at::kDouble), at::empty(x.sizes(), at::kDouble)};
  const auto from = x.accessor<float, 2>();
  auto bytes = result.bytes.accessor<uint8_t, 2>();
  auto scales = result.scales.accessor<float, 2>();
  auto values = result.values.accessor<double, 2>();
  auto codes = result.numbers.accessor<double, 2>();
  for (int64_t i = 0; i < x.size(0); i += height) {
    for (int64_t j = 0; j < x.size(1); j += width) {
      const int64_t last_row = std::min(i + height, x.size(0));
      const int64_t last_column = std::min(j + width, x.size(1));
      float amax = 0.0f;
      for (int64_t r = i; r < last_row; ++r)
        for (int64_t c = j; c < last_column; ++c) {
          if (std::isnan(amax)) continue;
          amax = std::isnan(from[r][c]) ? from[r][c] : std::max(amax, std::fabs(from[r][c]));
        }
      const float factor = reference::factor_of(448.0, std::fabs(amax), least);
      const float scale = scales[i / height][j / width] =
          std::isnan(factor) ? std::numeric_limits<float>::quiet_NaN() : 1.0f / factor;
      for (int64_t r = i; r < last_row; ++r)
        for (int64_t c = j; c < last_column; ++c) {
          bytes[r][c] = reference::e4m3(from[r][c] * factor);
          codes[r][c] = reference::of_e4m3(bytes[r][c]);
          values[r][c] = codes[r][c] * static_cast<double>(scale);
        }
    }
  }
  return result;
}

// --- weights -------------------------------------------------------------------------------------

struct Recipe {
  WeightRecipe recipe = WeightRecipe::kFp8Row;
  ProductForm weight_gradient = ProductForm::kQuantized;
};

inline std::string to_text(const Recipe& recipe) {
  return concat(row_of(recipe.recipe).name,
                recipe.weight_gradient == ProductForm::kPlain ? ", plain weight gradient" : "");
}

inline std::vector<Recipe> code_recipes() {
  std::vector<Recipe> recipes;
  for (const WeightRecipe recipe :
       {WeightRecipe::kFp8Tensor, WeightRecipe::kFp8Row, WeightRecipe::kFp8Block})
    for (const ProductForm type : {ProductForm::kQuantized, ProductForm::kPlain})
      recipes.push_back({recipe, type});
  return recipes;
}

inline Codes weight_codes(const at::Tensor& numbers, WeightRecipe recipe) {
  const WeightRecipeRow& row = row_of(recipe);
  return quantized(numbers, {row.scale_rows, row.scale_columns}, 1e-12f);
}

// Makes a parameter one of codes, which lie elsewhere at every call.
inline void tag(const at::Tensor& parameter, const at::Tensor& numbers, const Recipe& recipe) {
  const Codes codes = weight_codes(numbers, recipe.recipe);
  tag_quantized(parameter, [=] {
    return QuantizedWeight{.recipe = recipe.recipe,
                           .codes = codes.bytes.clone().view(at::kFloat8_e4m3fn),
                           .scales = codes.scales.clone(),
                           .weight_gradient = recipe.weight_gradient};
  });
}

// Without numbers: whoever reads them gets NaN.
inline at::Tensor tagged(const at::Tensor& numbers, const Recipe& recipe, at::ScalarType type) {
  const at::Tensor parameter = at::full(numbers.sizes(), NAN, type).set_requires_grad(true);
  tag(parameter, numbers, recipe);
  return parameter;
}

}  // namespace fsdp::testing::of_codes
