// The scale of a block of numbers, and a number's code under it: the one place that says it, for
// weights, activations and gradients, hosts and devices.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/base/narrow_float.h"

namespace fsdp {

// Magnitudes compare like their bits, NaN above all: amaxes are combined as numbers of 32 bits, and
// a NaN is never lost.
FSDP_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  return std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu;
}

// A block of smaller numbers is one of zeros: its factor would not be a number.
inline constexpr float kLeastAmax = 1e-12f;

// --- fp32 scales: fp8 with one scale for a matrix, a row or a block of 128 x 128 -----------------

// What numbers are multiplied by before they are rounded. Once per block, so it may take an exact
// division.
FSDP_HOST_DEVICE inline float fp8_factor(float amax) {
  const float bounded = amax < kLeastAmax ? kLeastAmax : amax;  // keeps NaN
  return static_cast<float>(static_cast<double>(Fp8E4M3::kMax) / static_cast<double>(bounded));
}

// What codes are multiplied by.
FSDP_HOST_DEVICE inline float fp8_scale(float factor) { return 1.0f / factor; }

// To nearest, ties to even; numbers out of range become the largest one, NaN stays NaN.
FSDP_HOST_DEVICE inline uint8_t fp8_code(float value, float factor) {
  const float scaled = value * factor;
  const float bounded = scaled > Fp8E4M3::kMax    ? Fp8E4M3::kMax
                        : scaled < -Fp8E4M3::kMax ? -Fp8E4M3::kMax
                                                  : scaled;
  return Fp8E4M3::nearest(bounded);
}

}  // namespace fsdp
