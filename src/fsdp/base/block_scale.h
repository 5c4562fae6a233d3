// The scale of a block of numbers, and a number's code under it: the one place that says it, for
// weights, activations and gradients, hosts and devices.
#pragma once

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

// A block of smaller numbers has the factor of this one. Weights below it are zeros, and torchao
// has the same bound. Activations and gradients have any size (a gradient is divided by all tokens
// of a step, and multiplied by --loss-scale), so theirs only keeps factor and scale normal numbers.
inline constexpr float kLeastWeightAmax = 1e-12f;
inline constexpr float kLeastAmax = 0x1p-116f;  // 448 / it < 2^127, its inverse > 2^-126

// --- fp32 scales: fp8 with one scale for a matrix, a row or a block of 128 x 128 -----------------

// Numbers are multiplied by this before they are rounded; `least` is one of the two above.
FSDP_HOST_DEVICE inline float fp8_factor(float amax, float least) {
  const float bounded = amax < least ? least : amax;  // keeps NaN
  return Fp8E4M3::kMax / bounded;
}

// The factor of codes. A NaN of a division has other bits on a device than on a host.
FSDP_HOST_DEVICE inline float fp8_scale(float factor) {
  return factor != factor ? std::bit_cast<float>(0x7FC00000u) : 1.0f / factor;
}

inline constexpr uint8_t kFp8Nan = 0x7F;

// To nearest, ties to even; numbers out of range become the largest one, NaN stays NaN. What GPUs
// convert to with saturation.
FSDP_HOST_DEVICE inline uint8_t fp8_code(float value, float factor) {
  const float scaled = value * factor;
  if (scaled != scaled) return kFp8Nan;
  const float bounded = scaled > Fp8E4M3::kMax    ? Fp8E4M3::kMax
                        : scaled < -Fp8E4M3::kMax ? -Fp8E4M3::kMax
                                                  : scaled;
  return Fp8E4M3::nearest(bounded);
}

// Whether it became the largest one. Rounding the factor may lift the block's largest number a
// little above that.
FSDP_HOST_DEVICE inline bool is_out_of_fp8(float value, float factor) {
  return magnitude_bits(value * factor) > std::bit_cast<uint32_t>(448.5f);
}

// --- MXFP8: e4m3 and a power of two --------------------------------------------------------------

inline constexpr int kE8M0Bias = 127;
inline constexpr uint8_t kE8M0Nan = 255;

// The smallest power of two with which no number of the block is out of range; NaN for one that is
// not finite.
FSDP_HOST_DEVICE inline uint8_t e8m0_scale(float amax) {
  const uint32_t bits = magnitude_bits(amax);
  if (bits >= 0x7F800000u) return kE8M0Nan;  // Inf, too, which no code can be
  // 448 is 1.75 * 2^8.
  const int exponent = static_cast<int>(bits >> 23) - 127 - 8;
  const int next = (bits & 0x7FFFFFu) > 0x600000u ? exponent + 1 : exponent;
  return static_cast<uint8_t>(next + kE8M0Bias < 0 ? 0 : next + kE8M0Bias);
}

// 2^(code - 127); 2^-127 is not a normal number.
FSDP_HOST_DEVICE inline float of_e8m0(uint8_t code) {
  if (code == kE8M0Nan) return std::bit_cast<float>(0x7FC00000u);
  return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

// Its inverse, which is a normal number up to 2^126.
FSDP_HOST_DEVICE inline float inverse_of_e8m0(uint8_t code) {
  if (code == kE8M0Nan) return std::bit_cast<float>(0x7FC00000u);
  return of_e8m0(static_cast<uint8_t>(2 * kE8M0Bias - code));
}

}  // namespace fsdp
