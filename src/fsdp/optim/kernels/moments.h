// Moments in narrow types, one element and one block's scale at a time; and whole moments as fp32
// numbers, for checkpoints.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/layout/segment.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp {

// --- narrow moments ------------------------------------------------------------------------------

// The bits of a finite number's magnitude, which are ordered like it. 0 for Inf and NaN, whose
// scale would leave nothing of their neighbours.
FSDP_HOST_DEVICE inline uint32_t finite_magnitude_bits(float value) {
  const uint32_t absolute = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu;
  const uint32_t is_finite = (absolute - 0x7F800000u) >> 31;
  return absolute & (0u - is_finite);  // no branch, for vectorisation
}

// The power of two that brings numbers up to a magnitude into a type's range; dividing by a power
// of two does not round. 0 for 0. Integer bits are ordered like magnitudes, so the scale is the
// difference to the type's largest number in whole exponents, rounded up.
template <typename Narrow>
FSDP_HOST_DEVICE inline float block_scale(uint32_t largest_magnitude_bits) {
  constexpr int32_t kExponent = 1 << 23;
  constexpr auto kMaxBits = std::bit_cast<int32_t>(Narrow::kMax);
  const auto largest = static_cast<int32_t>(largest_magnitude_bits);
  const int32_t above = largest - kMaxBits + 127 * kExponent + (kExponent - 1);
  const int32_t bounded = above < kExponent ? kExponent : above;
  return std::bit_cast<float>(largest == 0 ? 0 : bounded & 0x7F800000);
}

// 1 / scale for a scale of block_scale; a finite number for 0.
FSDP_HOST_DEVICE inline float inverse_scale(float scale) {
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
}

// Whether a root is rounded up. The probability makes the mean of the square right, not that of the
// root: squares of roots with the right mean are too large, by more than a step's decay, and would
// grow without bound. `random` is below 2^16.
FSDP_HOST_DEVICE inline bool root_goes_up(float root, float below, float above, uint32_t random) {
  // (random + 1/2) / 2^16, through the mantissa of a number from 1 to 2.
  const float part = std::bit_cast<float>(0x3F800040u | (random << 7)) - 1.0f;
  const float low_square = below * below;
  return part * (above * above - low_square) < root * root - low_square;
}

template <typename Narrow>
FSDP_HOST_DEVICE inline typename Narrow::Code root_code(float scaled_root, uint32_t random) {
  using Code = typename Narrow::Code;
  const auto [below, above, low] = Narrow::neighbours(scaled_root);
  const uint32_t code = low + (root_goes_up(scaled_root, below, above, random) ? 1u : 0u);
  const auto bits = std::bit_cast<uint32_t>(scaled_root);
  const uint32_t least = (bits + 0x7FFFFFFFu) >> 31;  // 0 for 0 only
  return static_cast<Code>(code > least ? code : least);
}

template <typename Narrow>
FSDP_HOST_DEVICE inline float squared_root(typename Narrow::Code code, float scale) {
  const float root = Narrow::widened(code) * scale;
  return root * root;
}

// --- as fp32 numbers, in host memory -------------------------------------------------------------

enum class MomentRole : uint8_t {
  kFirst,
  kSecond,  // scaled types keep its root
};

// `flat` is the moment's place in the group's whole buffer. read_moment() is exact, and
// write_moment() of its values restores them bit by bit (scales may change to other powers of two
// with the same meaning). Other values are rounded to nearest.
void read_moment(const Moment& moment, MomentRole role, FlatRange flat, float* values);
void write_moment(const float* values, MomentRole role, FlatRange flat, const Moment& moment);

}  // namespace fsdp
