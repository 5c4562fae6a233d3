// Conversions between fp32 and the narrow types of weights, gradients and moments: to nearest, or
// stochastically. Integer operations and selections only, so that loops over them vectorise and
// hosts and devices get the same bits.
#pragma once

#include <bit>
#include <cstdint>

#include "fsdp/base/compiler.h"

namespace fsdp {

// The meaning of a narrow type's largest exponent.
enum class TopExponent : uint8_t {
  kInfAndNan,       // as IEEE 754
  kNumbersAndANan,  // no Inf; all bits set is NaN (the "fn" of e4m3fn)
};

// A narrow type: 1 sign bit, kExponentBits, kMantissaBits.
template <typename CodeType, int kExponentBits, int kMantissaBits, TopExponent kTop>
struct NarrowFloat {
  using Code = CodeType;

 private:
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;  // of a mantissa, to fp32's
  static constexpr int kSignShift = 31 - kExponentBits - kMantissaBits;
  static constexpr uint32_t kMagnitudeMask = (1u << (kExponentBits + kMantissaBits)) - 1;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);  // as bits of fp32
  // Adding this number shifts the last bit of a subnormal to the last bit of an fp32 number.
  static constexpr uint32_t kSubnormalMagic =
      static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits + 23) << 23;
  static constexpr uint32_t kTopCode = kTop == TopExponent::kInfAndNan
                                           ? ((1u << kExponentBits) - 1) << kMantissaBits
                                           : kMagnitudeMask;  // Inf, or where there is none NaN
  static constexpr uint32_t kNanCode =
      kTop == TopExponent::kInfAndNan ? kTopCode | (1u << (kMantissaBits - 1)) : kMagnitudeMask;

  FSDP_HOST_DEVICE static float of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

  // Magnitudes that are too large, Inf and NaN; and the sign. (All of them arrive as codes beyond
  // the largest: their exponents do not fit.)
  FSDP_HOST_DEVICE static uint32_t finished(uint32_t magnitude, uint32_t bits) {
    const uint32_t bounded = magnitude > kTopCode ? kTopCode : magnitude;
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint32_t sign = (bits & 0x80000000u) >> kSignShift;
    return sign | (is_nan ? kNanCode : bounded);
  }

 public:
  // The largest number, and the smallest that is normal.
  static constexpr float kMax = std::bit_cast<float>(((kTopCode - 1) << kShift) + kRebias);
  static constexpr float kMinNormal = std::bit_cast<float>(kSmallestNormal);

  FSDP_HOST_DEVICE static float widened(Code code) {
    const uint32_t magnitude = code & kMagnitudeMask;
    const uint32_t shifted = magnitude << kShift;
    const uint32_t normal = shifted + kRebias;
    const float subnormal = of_bits(shifted + kSmallestNormal) - of_bits(kSmallestNormal);
    const uint32_t finite =
        magnitude < (1u << kMantissaBits) ? std::bit_cast<uint32_t>(subnormal) : normal;
    const uint32_t bits = magnitude >= kTopCode ? 0x7F800000u | shifted : finite;
    const uint32_t sign = (static_cast<uint32_t>(code) << kSignShift) & 0x80000000u;
    return of_bits(sign | bits);
  }

  // To nearest, ties to even.
  FSDP_HOST_DEVICE static Code nearest(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t absolute = bits & 0x7FFFFFFFu;
    const uint32_t last = (absolute >> kShift) & 1u;
    const uint32_t normal = (absolute - kRebias + ((1u << (kShift - 1)) - 1) + last) >> kShift;
    const float moved = of_bits(absolute) + of_bits(kSubnormalMagic);
    const uint32_t subnormal = std::bit_cast<uint32_t>(moved) - kSubnormalMagic;
    return static_cast<Code>(finished(absolute < kSmallestNormal ? subnormal : normal, bits));
  }

  // Away from zero with a probability that makes the mean right; `random` is below 2^16.
  FSDP_HOST_DEVICE static Code stochastic(float value, uint32_t random) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const Lifted lifted = lifted_magnitude(bits & 0x7FFFFFFFu);
    const uint32_t sum = std::bit_cast<uint32_t>(lifted.value) - lifted.bits_of_zero;
    return static_cast<Code>(finished((sum + random_part(random)) >> kShift, bits));
  }

  // The two numbers around one that is not negative; Inf counts as NaN.
  struct Neighbours {
    float below = 0.0f;
    float above = 0.0f;
    uint32_t code_below = 0;
  };
  FSDP_HOST_DEVICE static Neighbours neighbours(float value) {
    const Lifted lifted = lifted_magnitude(std::bit_cast<uint32_t>(value));
    const uint32_t low = std::bit_cast<uint32_t>(lifted.value) & ~((1u << kShift) - 1);
    const uint32_t high = low + (1u << kShift);
    const uint32_t code = (low - lifted.bits_of_zero) >> kShift;
    return {.below = of_bits(low) - lifted.by,
            .above = of_bits(high) - lifted.by,
            .code_below = code > kNanCode ? kNanCode : code};
  }
  // Neighbours of a number from kMinNormal to kMax, without a code.
  FSDP_HOST_DEVICE static Neighbours normal_neighbours(float value) {
    const uint32_t low = std::bit_cast<uint32_t>(value) & ~((1u << kShift) - 1);
    return {.below = of_bits(low), .above = of_bits(low + (1u << kShift))};
  }

 private:
  // Moved to the bits that rounding drops. Where more than 16 are dropped, the random part lies in
  // the middle of its interval, which leaves the mean of the result right.
  FSDP_HOST_DEVICE static uint32_t random_part(uint32_t random) {
    if constexpr (kShift <= 16) {
      return random >> (16 - kShift);
    } else {
      return (random << (kShift - 16)) + (1u << (kShift - 17));
    }
  }

  // Subnormals are as far apart as the smallest normal numbers: lifted by the smallest of those,
  // they can be cut like them.
  struct Lifted {
    float value = 0.0f;
    float by = 0.0f;
    uint32_t bits_of_zero = 0;  // what the bits of `value` are counted from
  };
  FSDP_HOST_DEVICE static Lifted lifted_magnitude(uint32_t magnitude) {
    const bool is_subnormal = magnitude < kSmallestNormal;
    const float by = of_bits(is_subnormal ? kSmallestNormal : 0u);
    const uint32_t one_exponent = is_subnormal ? 1u << 23 : 0u;
    return {.value = of_bits(magnitude) + by, .by = by, .bits_of_zero = kRebias + one_exponent};
  }
};

using Fp16 = NarrowFloat<uint16_t, 5, 10, TopExponent::kInfAndNan>;
using Fp8E4M3 = NarrowFloat<uint8_t, 4, 3, TopExponent::kNumbersAndANan>;
using Fp8E5M2 = NarrowFloat<uint8_t, 5, 2, TopExponent::kInfAndNan>;

// Not narrow, for loops over any of them.
struct Fp32 {
  using Code = float;
  static constexpr bool kRounds = false;  // numbers of fp32 that are stored in it
  FSDP_HOST_DEVICE static float widened(Code value) { return value; }
  FSDP_HOST_DEVICE static Code nearest(float value) { return value; }
};

// The upper half of fp32: no rebias, no subnormals of its own.
struct Bf16 {
  using Code = uint16_t;
  static constexpr bool kRounds = true;

  FSDP_HOST_DEVICE static float widened(Code code) {
    return std::bit_cast<float>(static_cast<uint32_t>(code) << 16);
  }
  FSDP_HOST_DEVICE static Code nearest(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return finished(bits + 0x7FFFu + ((bits >> 16) & 1u), value);
  }
  FSDP_HOST_DEVICE static Code stochastic(float value, uint32_t random) {
    return finished(std::bit_cast<uint32_t>(value) + random, value);
  }

 private:
  FSDP_HOST_DEVICE static Code finished(uint32_t rounded, float value) {
    return static_cast<Code>((value != value ? 0x7FC00000u : rounded) >> 16);
  }
};

}  // namespace fsdp
