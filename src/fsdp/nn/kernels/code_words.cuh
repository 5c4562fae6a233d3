// Four numbers as the codes of fp8, in a word.
#pragma once

#include <cstdint>

#include "fsdp/base/block_scale.h"
#include "fsdp/base/narrow_vector.cuh"

namespace fsdp::nn {

// The numbers times their factor, with fp8_code()'s bits: a device's own conversion bounds numbers
// like it, and has the same NaN.
__device__ inline uint32_t code_word(const Numbers& scaled) {
  if constexpr (kConvertsFp8) return nearest_in_range<Fp8E4M3>(scaled).words[0];
  return vector_of<uint8_t>([&](int k) { return fp8_code(scaled.of[k], 1.0f); }).words[0];
}

__device__ inline float factor_of(uint32_t amax) {
  return fp8_factor(__uint_as_float(amax), kLeastAmax);
}

}  // namespace fsdp::nn
