// fp32 numbers as bf16 numbers and what those lack: 4 bytes instead of 6 for a weight that computes
// in bf16 and is updated in fp32.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

// bits of fp32 = (bits of bf16 << 16) + remainder, a signed 16-bit number. The bf16 number is the
// nearest one, ties away from zero: with ties to even an upper half could come from 65537 numbers,
// one more than a remainder can tell apart. Exact both ways but for the payload of NaNs.

// bf16 and remainder of the same length; fp32 out. Reads, allocates.
at::Tensor join_halves(const at::Tensor& upper, const at::Tensor& remainder);

// The inverse: writes upper and remainder.
void split_into_halves(const at::Tensor& values, const at::Tensor& upper,
                       const at::Tensor& remainder);

}  // namespace fsdp
