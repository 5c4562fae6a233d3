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
  at::Tensor codes;         // uint8, as QuantizedWeight::codes
  at::Tensor scales;        // as QuantizedWeight::scales
  at::Tensor matrix_scale;  // kNvFp4
  at::Tensor amaxes;        // of all scales of four bytes
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

// The nearest of the 8 magnitudes; of two equally near ones that with an even code.
inline uint8_t e2m1(float value) {
  static constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  uint8_t best = 0;
  for (uint8_t code = 1; code < 8; ++code) {
    const float now = std::abs(std::abs(value) - kMagnitudes[code]);
    const float before = std::abs(std::abs(value) - kMagnitudes[best]);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 8 : 0));
}
inline float of_e2m1(uint8_t code) {
  static constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// `least`: of weights, or of activations and gradients.
inline float factor_of(double largest_code, float amax, float least = 1e-12f) {
  return static_cast<float>(largest_code / std::max(amax, least));
}

}  // namespace reference

// `amaxes`, if defined: of all scales of four bytes, instead of the matrix's own.
inline ReferenceCodes quantized_by_loop(const at::Tensor& matrix, WeightRecipe recipe,
                                        const at::Tensor& amaxes = {}) {
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
  result.codes = at::zeros({rows, columns * row.code_bits / 8}, at::kByte);
  result.scales = at::zeros({down, across}, row.scale_bytes == 4 ? at::kFloat : at::kByte);
  result.amaxes = at::zeros({down, across});
  auto code = result.codes.accessor<uint8_t, 2>();

  float matrix_factor = 1.0f;
  if (row.has_matrix_scale) {
    const float amax = amaxes.defined() ? amaxes.item<float>() : values.abs().max().item<float>();
    matrix_factor = reference::factor_of(448.0 * 6.0, amax);
    result.matrix_scale = at::full({1}, 1.0f / matrix_factor);
  }
  for (int64_t i = 0; i < down; ++i)
    for (int64_t j = 0; j < across; ++j) {
      float amax = 0.0f;
      const auto each = [&](const auto& body) {
        for (int64_t r = i * block_rows; r < std::min(rows, (i + 1) * block_rows); ++r)
          for (int64_t c = j * block_columns; c < std::min(columns, (j + 1) * block_columns); ++c)
            body(r, c);
      };
      each([&](int64_t r, int64_t c) { amax = std::max(amax, std::abs(x[r][c])); });
      result.amaxes[i][j] = amax;
      if (row.scale_bytes == 4) {
        if (amaxes.defined()) amax = amaxes.view({down, across})[i][j].item<float>();
        const float factor = reference::factor_of(448.0, amax);
        result.scales[i][j] = 1.0f / factor;
        each([&](int64_t r, int64_t c) { code[r][c] = reference::e4m3(x[r][c] * factor); });
      } else if (!row.has_matrix_scale) {
        // The smallest power of two that keeps the block within 448.
        int exponent = std::isfinite(amax) ? -127 : 128;
        while (exponent < 127 && static_cast<double>(amax) > std::ldexp(448.0, exponent))
          ++exponent;
        result.scales[i][j] = exponent + 127;
        each([&](int64_t r, int64_t c) {
          const double scaled = std::ldexp(static_cast<double>(x[r][c]), -exponent);
          code[r][c] = exponent == 128 ? 0x7F : reference::e4m3(static_cast<float>(scaled));
        });
      } else {
        const uint8_t scale =
            reference::e4m3(std::clamp(amax / 6.0f * matrix_factor, 0.015625f, 448.0f));
        result.scales[i][j] = scale;
        const float factor = matrix_factor / reference::of_e4m3(scale);
        each([&](int64_t r, int64_t c) {
          const uint8_t four_bits = reference::e2m1(x[r][c] * factor);
          code[r][c / 2] =
              static_cast<uint8_t>(code[r][c / 2] | (c % 2 == 0 ? four_bits : four_bits << 4));
        });
      }
    }
  return result;
}

}  // namespace fsdp::testing
