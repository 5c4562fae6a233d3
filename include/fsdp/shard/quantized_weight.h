// Lets a layer compute with a weight that is gathered as codes and scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/base/weight_recipe.h"

namespace fsdp {

// A whole matrix while its unit is whole. Number [i, j] is codes[i, j] * scale of its block.
struct QuantizedWeight {
  WeightRecipe recipe = WeightRecipe::kFp8Row;
  // [rows, columns] of float8_e4m3fn; kNvFp4: [rows, columns / 2] of uint8, the first of two
  // elements in the lower half.
  at::Tensor codes;
  // fp32, one per block: [1, 1], [rows, 1], [ceil(rows / 128), ceil(columns / 128)]; kMxFp8 and
  // kNvFp4: uint8 (E8M0, e4m3), [rows, ceil(columns / 32 or 16)].
  at::Tensor scales;
  at::Tensor matrix_scale;  // kNvFp4: fp32, [1]
  ProductForm weight_gradient = ProductForm::kQuantized;
};

// For a layer's forward and backward. nullopt: the parameter is not quantised, use it as it is. A
// quantised parameter keeps its type and shape for autograd, but has no numbers of its own:
// touching them is an error.
std::optional<QuantizedWeight> quantized_weight(const at::Tensor& parameter);

// A module whose own parameters may be quantised, because it asks quantized_weight() for them.
class QuantizableModule {
 public:
  virtual ~QuantizableModule() = default;
  // Of a matrix that the module multiplies.
  virtual bool is_quantizable(const std::string& parameter) const = 0;
};

}  // namespace fsdp
