// How moments are kept in narrow types, one element and one block's scale at a time.
//
// First moments (and momenta) are rounded to nearest: they change by a tenth per step, more than
// half an ulp. Second moments change by a thousandth: rounded to nearest they would never decay, so
// they are rounded stochastically. Scaled types hold the root of a second moment, which needs half
// the range, and never round it to 0, which would divide a step by eps. tests/unit has the
// measurements (moment_formats_test.cpp).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "fsdp/base/host_device.h"
#include "fsdp/base/narrow_float.h"

namespace fsdp {

// The bits of a finite number's magnitude, which are ordered like it; 0 for others, so that one of
// those does not set a scale that leaves nothing of its neighbours.
FSDP_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  const uint32_t absolute = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu;
  const uint32_t is_finite = (absolute - 0x7F800000u) >> 31;
  return absolute & (0u - is_finite);  // without a branch, for the sake of vectorisation
}

// The power of two that brings numbers up to a magnitude into a type's range. Powers of two, since
// dividing by them does not round. 0 for 0. As integers, magnitudes and their quotients are ordered
// alike: what the largest has more than the type's own largest, in whole exponents, rounded up.
template <typename Narrow>
FSDP_HOST_DEVICE inline float block_scale(uint32_t largest_magnitude_bits) {
  constexpr int32_t kExponent = 1 << 23;
  constexpr auto kMaxBits = std::bit_cast<int32_t>(Narrow::kMax);
  const auto largest = static_cast<int32_t>(largest_magnitude_bits);
  const int32_t above = largest - kMaxBits + 127 * kExponent + (kExponent - 1);
  const int32_t bounded = above < kExponent ? kExponent : above;
  return std::bit_cast<float>(largest == 0 ? 0 : bounded & 0x7F800000);
}

// 1 / scale for a scale of block_scale; something finite for 0.
FSDP_HOST_DEVICE inline float inverse_scale(float scale) {
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
}

// Which neighbour a root becomes, so that its square has the right mean: it is chosen with the
// probability that the square, not the root, asks for. (Roots with the right mean have squares
// above it, by more than a step's decay, and would grow without bound.) `random` is below 2^16.
FSDP_HOST_DEVICE inline bool root_goes_up(float root, float below, float above, uint32_t random) {
  // (random + 1/2) / 2^16, by way of the mantissa of a number from 1 to 2.
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
  const uint32_t least = (bits + 0x7FFFFFFFu) >> 31;  // 0 for 0 alone
  return static_cast<Code>(code > least ? code : least);
}

template <typename Narrow>
FSDP_HOST_DEVICE inline float squared_root(typename Narrow::Code code, float scale) {
  const float root = Narrow::widened(code) * scale;
  return root * root;
}

}  // namespace fsdp
