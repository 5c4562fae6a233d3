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

// What codes are multiplied by. A NaN of a division has other bits on a device than on a host.
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

// --- NVFP4: e2m1, an e4m3 scale for 16 numbers, and an fp32 scale for all ------------------------

inline constexpr float kMaxE2M1 = 6.0f;

// To nearest, ties to even; numbers out of range become 6, and so does NaN, whose block's scale is
// NaN.
FSDP_HOST_DEVICE inline uint8_t e2m1_code(float value) {
  const float magnitude = std::bit_cast<float>(magnitude_bits(value));
  const uint8_t code = magnitude <= 0.25f   ? 0
                       : magnitude < 0.75f  ? 1
                       : magnitude <= 1.25f ? 2
                       : magnitude < 1.75f  ? 3
                       : magnitude <= 2.5f  ? 4
                       : magnitude < 3.5f   ? 5
                       : magnitude <= 5.0f  ? 6
                                            : 7;
  return static_cast<uint8_t>(code | (std::bit_cast<uint32_t>(value) >> 31) << 3);
}

FSDP_HOST_DEVICE inline float of_e2m1(uint8_t code) {
  constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float magnitude = kValues[code & 7];
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// What scales of blocks are multiplied by before they are rounded to e4m3.
FSDP_HOST_DEVICE inline float nvfp4_matrix_factor(float amax) {
  const float bounded = amax < kLeastWeightAmax ? kLeastWeightAmax : amax;
  return Fp8E4M3::kMax * kMaxE2M1 / bounded;
}

// A block's scale is a normal number, so that a block of small ones is not lost.
FSDP_HOST_DEVICE inline uint8_t nvfp4_block_scale(float block_amax, float matrix_factor) {
  const float wanted = block_amax / kMaxE2M1 * matrix_factor;
  const float bounded = wanted > Fp8E4M3::kMax         ? Fp8E4M3::kMax
                        : wanted < Fp8E4M3::kMinNormal ? Fp8E4M3::kMinNormal
                                                       : wanted;
  return Fp8E4M3::nearest(bounded);
}

// What a block's numbers are multiplied by.
FSDP_HOST_DEVICE inline float nvfp4_factor(uint8_t block_scale, float matrix_factor) {
  return matrix_factor / Fp8E4M3::widened(block_scale);
}

}  // namespace fsdp
