// Where the gradient of a layer's matrix goes: straight into the slab that is reduced, or to
// autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "fsdp/shard/direct_gradient.h"

namespace fsdp::nn {

enum class ProductUse : uint8_t { kStored, kAdded };

// target = transposed * inputs, or target += that; transposed: [rows, n], inputs: [n, columns]. The
// target has the inputs' type, or fp32 for narrow ones: then nothing is rounded before it is
// summed.
void write_product(at::Tensor target, const at::Tensor& transposed, const at::Tensor& inputs,
                   ProductUse use);

// The layer writes all rows of the gradient, each once.
class WeightGradient {
 public:
  explicit WeightGradient(const at::Tensor& weight);

  // gradient[first ...] = transposed * inputs; transposed: [rows of the matrix, n], inputs: [n,
  // columns of the matrix]; zeros if n is 0.
  void write_rows(int64_t first, const at::Tensor& transposed, const at::Tensor& inputs);

  // All rows at once: what `product` writes to the tensor that it is given, of fp32 or of the
  // weight's type.
  void write(const std::function<void(const at::Tensor& to)>& product);

  // The whole gradient at once: values * factor, computed in the wider of their types; factor: [1].
  void write(const at::Tensor& values, const at::Tensor& factor);

  // Undefined if the gradient is in its slab.
  const at::Tensor& for_autograd() const { return own_; }

 private:
  at::Tensor own_;
  DirectGradient target_;
};

}  // namespace fsdp::nn
