#include "fsdp/shard/split_tensor.h"

#include <ATen/ATen.h>

namespace fsdp {

at::Tensor join_halves(const at::Tensor& upper, const at::Tensor& remainder) {
  const at::Tensor shifted = upper.view(at::kShort).to(at::kInt).bitwise_left_shift(16);
  return shifted.add_(remainder).view(at::kFloat);
}

void split_into_halves(const at::Tensor& values, const at::Tensor& upper,
                       const at::Tensor& remainder) {
  // What rounds a NaN up could make it a number.
  const at::Tensor clean = at::where(values.isnan(), at::full_like(values, NAN), values);
  const at::Tensor bits = clean.contiguous().view(at::kInt);
  const at::Tensor nearest = bits.add(0x8000).bitwise_right_shift(16);
  upper.view(at::kShort).copy_(nearest);
  remainder.copy_(bits - nearest.bitwise_left_shift(16));
}

}  // namespace fsdp
