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
#include "fsdp/optim/narrow_float.h"

namespace fsdp {

// The bits of a finite number's magnitude, which are ordered like it; 0 for others, so that one of
// those does not set a scale that leaves nothing of its neighbours.
FSDP_HOST_DEVICE inline uint32_t magnitude_bits(float value) {
  const uint32_t absolute = std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu;
  return absolute >= 0x7F800000u ? 0u : absolute;
}

// The power of two that brings numbers up to a magnitude into a type's range. Powers of two, since
// dividing by them does not round. 0 for 0.
template <typename Narrow>
FSDP_HOST_DEVICE inline float block_scale(uint32_t largest_magnitude_bits) {
  const float ratio = std::bit_cast<float>(largest_magnitude_bits) / Narrow::kMax;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(ratio) + 0x007FFFFFu) & 0x7F800000u);
}

// 1 / scale for a scale of block_scale; something finite for 0.
FSDP_HOST_DEVICE inline float inverse_scale(float scale) {
  return std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale));
}

// A root whose square has the right mean: of the two neighbours one is chosen with the probability
// that the square, not the root, asks for. (Roots with the right mean have squares above it, by
// more than a step's decay, and would grow without bound.)
template <typename Narrow>
FSDP_HOST_DEVICE inline typename Narrow::Code root_code(float scaled_root, uint32_t random) {
  using Code = typename Narrow::Code;
  const Code low = Narrow::truncated(scaled_root);
  const Code high = static_cast<Code>(low + 1);
  const float below = Narrow::widened(low) * Narrow::widened(low);
  const float above = Narrow::widened(high) * Narrow::widened(high);
  const float part = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
  const bool goes_up = part * (above - below) < scaled_root * scaled_root - below;
  const Code code = goes_up ? high : low;
  return code == 0 && scaled_root > 0.0f ? Code{1} : code;
}

template <typename Narrow>
FSDP_HOST_DEVICE inline float squared_root(typename Narrow::Code code, float scale) {
  const float root = Narrow::widened(code) * scale;
  return root * root;
}

}  // namespace fsdp
