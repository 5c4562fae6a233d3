// An fp32 weight in two halves: the bf16 number that computes, and a 16-bit remainder that makes it
// exact again.
#pragma once

#include <bit>
#include <cstdint>

#include "fsdp/base/host_device.h"

namespace fsdp {

// bits of fp32 = (bits of bf16 << 16) + remainder. The bf16 number is the nearest one, ties away
// from zero: with ties to even, an even bf16 number would stand for 65537 fp32 numbers, one more
// than the remainder has values. Magnitudes are ordered like their bits, so the rule is the same
// for both signs, and numbers above the largest bf16 become Inf with a remainder that leads back.
struct SplitWeight {
  uint16_t upper = 0;  // bits of the bf16 number
  int16_t remainder = 0;
};

// The bits of the nearest bf16 number, ties away from zero; 0x7FC0 for every NaN.
FSDP_HOST_DEVICE inline uint16_t rounded_away(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest = (bits + 0x8000u) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7FC0u : nearest);
}

// NaN has no remainder: bits + 0x8000 could wrap around to those of 0.
FSDP_HOST_DEVICE inline SplitWeight split_weight(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t upper = (bits + 0x8000u) >> 16;
  const uint32_t remainder = bits - (upper << 16);
  const bool is_nan = value != value;
  return {.upper = static_cast<uint16_t>(is_nan ? 0x7FC0u : upper),
          .remainder = static_cast<int16_t>(static_cast<uint16_t>(is_nan ? 0u : remainder))};
}

FSDP_HOST_DEVICE inline float join_weight(SplitWeight split) {
  const auto remainder = static_cast<uint32_t>(static_cast<int32_t>(split.remainder));
  return std::bit_cast<float>((static_cast<uint32_t>(split.upper) << 16) + remainder);
}

// The same for arrays; `weight` holds bf16 numbers.
void join_weights(const void* weight, const int16_t* remainder, float* joined, int64_t numel);
void split_weights(const float* joined, void* weight, int16_t* remainder, int64_t numel);

}  // namespace fsdp
