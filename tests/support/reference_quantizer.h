// Quantisation of a whole matrix as a plain loop over its blocks, with libtorch's conversions.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/Float8_e4m3fn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fsdp/base/weight_recipe.h"

namespace fsdp::testing {

struct ReferenceCodes {
  at::Tensor codes;   // uint8, as QuantizedWeight::codes
  at::Tensor scales;  // as QuantizedWeight::scales
};

namespace reference {

// All NaNs are one code.
inline uint8_t e4m3(float value) {
  if (std::isnan(value)) return 0x7F;
  return c10::Float8_e4m3fn(std::clamp(value, -448.0f, 448.0f)).x;
}
inline float of_e4m3(uint8_t code) {
  return c10::Float8_e4m3fn(code, c10::Float8_e4m3fn::from_bits());
}

// `least`: of weights, or of activations and gradients.
inline float factor_of(double largest_code, float amax, float least = 1e-12f) {
  return static_cast<float>(largest_code / std::max(amax, least));
}

}  // namespace reference

inline ReferenceCodes quantized_by_loop(const at::Tensor& matrix, WeightRecipe recipe) {
  const at::Tensor values = matrix.to(at::kFloat).contiguous();
  const int64_t rows = values.size(0);
  const int64_t columns = values.size(1);
  const auto x = values.accessor<float, 2>();
  const WeightRecipeRow& row = row_of(recipe);
  const int64_t block_rows = row.scale_rows == 0 ? rows : row.scale_rows;
  const int64_t block_columns = row.scale_columns == 0 ? columns : row.scale_columns;
  const int64_t down = (rows + block_rows - 1) / block_rows;
  const int64_t across = (columns + block_columns - 1) / block_columns;

  ReferenceCodes result;
  result.codes = at::zeros({rows, columns}, at::kByte);
  result.scales = at::zeros({down, across}, row.scale_bytes == 4 ? at::kFloat : at::kByte);
  auto code = result.codes.accessor<uint8_t, 2>();

  for (int64_t i = 0; i < down; ++i)
    for (int64_t j = 0; j < across; ++j) {
      float amax = 0.0f;
      const auto each = [&](const auto& body) {
        for (int64_t r = i * block_rows; r < std::min(rows, (i + 1) * block_rows); ++r)
          for (int64_t c = j * block_columns; c < std::min(columns, (j + 1) * block_columns); ++c)
            body(r, c);
      };
      each([&](int64_t r, int64_t c) { amax = std::max(amax, std::abs(x[r][c])); });
      if (row.scale_bytes == 4) {
        const float factor = reference::factor_of(448.0, amax);
        result.scales[i][j] = 1.0f / factor;
        each([&](int64_t r, int64_t c) { code[r][c] = reference::e4m3(x[r][c] * factor); });
      } else {
        // The smallest power of two that keeps the block within 448.
        int exponent = std::isfinite(amax) ? -127 : 128;
        while (exponent < 127 && static_cast<double>(amax) > std::ldexp(448.0, exponent))
          ++exponent;
        result.scales[i][j] = exponent + 127;
        each([&](int64_t r, int64_t c) {
          const double scaled = std::ldexp(static_cast<double>(x[r][c]), -exponent);
          code[r][c] = exponent == 128 ? 0x7F : reference::e4m3(static_cast<float>(scaled));
        });
      }
    }
  return result;
}

}  // namespace fsdp::testing
