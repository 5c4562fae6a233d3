// Conversions between fp32 and the narrow types of weights, gradients and moments: to nearest, or
// stochastically. Integer operations and selections only, so that loops over them vectorise and
// hosts and devices get the same bits.
#pragma once

#include <bit>
#include <cstdint>

#include "fsdp/base/host_device.h"

namespace fsdp {

// What a narrow type does with its largest exponent.
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

  // Too large a magnitude, Inf and NaN; and the sign.
  FSDP_HOST_DEVICE static Code finished(uint32_t magnitude, uint32_t bits) {
    const uint32_t absolute = bits & 0x7FFFFFFFu;
    const uint32_t bounded = magnitude > kTopCode ? kTopCode : magnitude;
    const uint32_t overflowed = absolute >= 0x7F800000u ? kTopCode : bounded;
    const uint32_t finite_or_not = absolute > 0x7F800000u ? kNanCode : overflowed;
    const uint32_t sign = (bits & 0x80000000u) >> kSignShift;
    return static_cast<Code>(sign | finite_or_not);
  }

 public:
  // The largest number, and the smallest above 0.
  static constexpr float kMax = std::bit_cast<float>(((kTopCode - 1) << kShift) + kRebias);
  static constexpr float kMinSubnormal =
      std::bit_cast<float>(kSmallestNormal - (static_cast<uint32_t>(kMantissaBits) << 23));

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
    return finished(absolute < kSmallestNormal ? subnormal : normal, bits);
  }

  // Away from zero with a probability that makes the mean right; `random` has 32 random bits.
  FSDP_HOST_DEVICE static Code stochastic(float value, uint32_t random) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t absolute = bits & 0x7FFFFFFFu;
    const uint32_t normal = (absolute - kRebias + (random >> (32 - kShift))) >> kShift;
    return finished(absolute < kSmallestNormal ? subnormal_steps(absolute, random) : normal, bits);
  }

  // Towards zero.
  FSDP_HOST_DEVICE static Code truncated(float value) { return stochastic(value, 0); }

 private:
  // How many times the smallest number, plus a random part of 1.
  FSDP_HOST_DEVICE static uint32_t subnormal_steps(uint32_t absolute, uint32_t random) {
    // Numbers above the smallest normal one are not meant, and must not overflow an integer.
    const uint32_t bounded = absolute < kSmallestNormal ? absolute : kSmallestNormal;
    // As many random bits as fit behind the largest number of steps: the sum must not round up.
    constexpr float kRandomUnit = 1.0f / static_cast<float>(1u << kShift);
    const float part =
        static_cast<float>(static_cast<int32_t>(random >> (32 - kShift))) * kRandomUnit;
    const float steps = of_bits(bounded) * (1.0f / kMinSubnormal) + part;
    return static_cast<uint32_t>(static_cast<int32_t>(steps));
  }
};

using Fp16 = NarrowFloat<uint16_t, 5, 10, TopExponent::kInfAndNan>;
using Fp8E4M3 = NarrowFloat<uint8_t, 4, 3, TopExponent::kNumbersAndANan>;
using Fp8E5M2 = NarrowFloat<uint8_t, 5, 2, TopExponent::kInfAndNan>;

// The upper half of fp32: no rebias, no subnormals of its own.
struct Bf16 {
  using Code = uint16_t;

  FSDP_HOST_DEVICE static float widened(Code code) {
    return std::bit_cast<float>(static_cast<uint32_t>(code) << 16);
  }
  FSDP_HOST_DEVICE static Code nearest(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return finished(bits + 0x7FFFu + ((bits >> 16) & 1u), value);
  }
  FSDP_HOST_DEVICE static Code stochastic(float value, uint32_t random) {
    return finished(std::bit_cast<uint32_t>(value) + (random >> 16), value);
  }

 private:
  FSDP_HOST_DEVICE static Code finished(uint32_t rounded, float value) {
    return static_cast<Code>((value != value ? 0x7FC00000u : rounded) >> 16);
  }
};

}  // namespace fsdp
