// Where the gradient of a layer's matrix goes: straight into the slab that is reduced, or to
// autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "fsdp/shard/direct_gradient.h"

namespace fsdp::nn {

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

  // Undefined if the gradient is in its slab.
  const at::Tensor& for_autograd() const { return own_; }

 private:
  at::Tensor own_;
  DirectGradient target_;
};

}  // namespace fsdp::nn
