// A layer may do more with its weights than compute with them as tensors: write a gradient
// straight into the buffer that is reduced, and compute with codes and scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/base/weight_recipe.h"

namespace fsdp {

// For a layer's backward. If `target` is defined, the layer writes   target = beta * target +
// gradient   (beta is 0 or 1; with 0 the target is not read) and returns no gradient to autograd:
// no full-size gradient is allocated, and nothing is copied. If `target` is undefined, the layer
// returns the gradient as usual (the parameter is not sharded, its gradients travel in a type the
// layer cannot write, or its unit is used again later in this backward).
struct DirectGradient {
  at::Tensor target;
  double beta = 0.0;
};

// The types that a layer can write.
enum class GradientType : uint8_t {
  kOfParameter,  // the parameter's own dtype
  kOrWider,  // or fp32 for a bf16 or fp16 parameter, as products of matrices on a GPU can: nothing
             // is rounded before it is summed
};

DirectGradient direct_gradient(const at::Tensor& parameter,
                               GradientType type = GradientType::kOfParameter);

// A whole matrix while its unit is whole. Number [i, j] is codes[i, j] * scale of its block.
struct QuantizedWeight {
  WeightRecipe recipe = WeightRecipe::kFp8Row;
  at::Tensor codes;  // [rows, columns] of float8_e4m3fn
  // fp32, one per block: [1, 1], [rows, 1], [ceil(rows / 128), ceil(columns / 128)]; kMxFp8: uint8
  // (E8M0), [rows, columns / 32].
  at::Tensor scales;
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
  // Asked for a matrix that the module multiplies.
  virtual bool is_quantizable(const std::string& parameter) const = 0;
};

}  // namespace fsdp
