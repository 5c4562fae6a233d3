// An fp32 weight in two halves: the bf16 number for computing, and a 16-bit remainder that restores
// the exact number.
#pragma once

#include <bit>
#include <cstdint>

#include "fsdp/base/compiler.h"

namespace fsdp {

// bits of fp32 = (bits of bf16 << 16) + remainder. The bf16 number is the nearest one, ties away
// from zero: with ties to even, an even bf16 number would stand for 65537 fp32 numbers, one more
// than the remainder has values. Magnitudes are ordered like their bits, so the rule is the same
// for both signs, and numbers above the largest bf16 become Inf with a remainder that leads back.
struct SplitWeight {
  uint16_t upper = 0;  // bits of the bf16 number
  int16_t remainder = 0;
};

// Gives NaN its usual form: rounding the bits of other NaNs could overflow to those of 0.
FSDP_HOST_DEVICE inline uint32_t bits_to_split(float value) {
  return value != value ? 0x7FC00000u : std::bit_cast<uint32_t>(value);
}

// The bits of the nearest bf16 number, ties away from zero; 0x7FC0 for every NaN.
FSDP_HOST_DEVICE inline uint16_t rounded_away(float value) {
  return static_cast<uint16_t>((bits_to_split(value) + 0x8000u) >> 16);
}

// The remainder lies within half of 2^16, like the lower half read as a signed number.
FSDP_HOST_DEVICE inline SplitWeight split_weight(float value) {
  const uint32_t bits = bits_to_split(value);
  return {.upper = static_cast<uint16_t>((bits + 0x8000u) >> 16),
          .remainder = static_cast<int16_t>(static_cast<uint16_t>(bits))};
}

FSDP_HOST_DEVICE inline float join_weight(SplitWeight split) {
  const auto remainder = static_cast<uint32_t>(static_cast<int32_t>(split.remainder));
  return std::bit_cast<float>((static_cast<uint32_t>(split.upper) << 16) + remainder);
}

}  // namespace fsdp
