// Sixteen numbers at a time between fp32 and a narrow type (aarch64): the bits that narrow_float.h
// computes one by one, with operations that this core has for it.
//
// Every NaN is expected in its usual form (default_nan.h), so that none has to be looked for.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <bit>
#include <cstdint>

#include "fsdp/base/inlined.h"
#include "fsdp/base/narrow_float.h"

namespace fsdp::vectors {

// Four vectors: enough operations that do not wait for each other, with operands in registers.
struct Sixteen {
  float32x4_t a, b, c, d;
};

// What function makes of each vector.
template <typename Function, typename... Numbers>
FSDP_INLINED Sixteen each(const Function& function, const Numbers&... numbers) {
  return {function(numbers.a...), function(numbers.b...), function(numbers.c...),
          function(numbers.d...)};
}

FSDP_INLINED uint32x4_t as_bits(float32x4_t values) { return vreinterpretq_u32_f32(values); }
FSDP_INLINED float32x4_t as_floats(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }

FSDP_INLINED Sixteen load(const float* from) {
  return {vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
FSDP_INLINED void store(float* to, const Sixteen& values) {
  vst1q_f32(to, values.a);
  vst1q_f32(to + 4, values.b);
  vst1q_f32(to + 8, values.c);
  vst1q_f32(to + 12, values.d);
}

FSDP_INLINED Sixteen product(const Sixteen& values, float32x4_t factor) {
  return each([&](float32x4_t part) { return vmulq_f32(part, factor); }, values);
}

// Sixteen bits of every number, in order.
struct Halves {
  uint16x8_t low, high;
};
FSDP_INLINED Halves load(const uint16_t* from) { return {vld1q_u16(from), vld1q_u16(from + 8)}; }
FSDP_INLINED void store(uint16_t* to, const Halves& halves) {
  vst1q_u16(to, halves.low);
  vst1q_u16(to + 8, halves.high);
}
template <typename Function, typename... Parts>
FSDP_INLINED Halves each_half(const Function& function, const Parts&... parts) {
  return {function(parts.low...), function(parts.high...)};
}

FSDP_INLINED Halves lower_halves(const Sixteen& words) {
  const auto of = [](float32x4_t first, float32x4_t second) {
    return vuzp1q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second));
  };
  return {of(words.a, words.b), of(words.c, words.d)};
}
FSDP_INLINED Halves upper_halves(const Sixteen& words) {
  const auto of = [](float32x4_t first, float32x4_t second) {
    return vuzp2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second));
  };
  return {of(words.a, words.b), of(words.c, words.d)};
}

// The bits of numbers plus those of halves.
FSDP_INLINED Sixteen sum(const Sixteen& words, const Halves& halves) {
  return {as_floats(vaddw_u16(as_bits(words.a), vget_low_u16(halves.low))),
          as_floats(vaddw_high_u16(as_bits(words.b), halves.low)),
          as_floats(vaddw_u16(as_bits(words.c), vget_low_u16(halves.high))),
          as_floats(vaddw_high_u16(as_bits(words.d), halves.high))};
}

// --- one specialisation per type -----------------------------------------------------------------

// load widens. store_nearest rounds to nearest, ties to even (fp8: finite numbers within the range
// only), store_stochastic like the function of that name, and store_exact takes numbers that the
// type has.
template <typename Narrow>
struct Codes;

template <>
struct Codes<Fp32> {
  FSDP_INLINED static Sixteen load(const float* from) { return vectors::load(from); }
};

template <>
struct Codes<Bf16> {
  FSDP_INLINED static Sixteen load(const uint16_t* from) { return widened(vectors::load(from)); }

  FSDP_INLINED static Sixteen widened(const Halves& codes) {
    const uint16x8_t zero = vdupq_n_u16(0);  // no shifts: there is one unit for those
    const auto low = [&](uint16x8_t part) { return vreinterpretq_f32_u16(vzip1q_u16(zero, part)); };
    const auto high = [&](uint16x8_t part) {
      return vreinterpretq_f32_u16(vzip2q_u16(zero, part));
    };
    return {low(codes.low), high(codes.low), low(codes.high), high(codes.high)};
  }

  FSDP_INLINED static void store_nearest(uint16_t* to, const Sixteen& values) {
    const auto added = [](float32x4_t part) {
      const uint32x4_t is_odd = vtstq_u32(as_bits(part), vdupq_n_u32(0x10000u));  // -1 or 0
      return vsubq_u32(vdupq_n_u32(0x7FFFu), is_odd);
    };
    const auto rounded = [&](float32x4_t first, float32x4_t second) {
      const uint16x4_t low = vaddhn_u32(as_bits(first), added(first));
      return vaddhn_high_u32(low, as_bits(second), added(second));
    };
    store(to, Halves{rounded(values.a, values.b), rounded(values.c, values.d)});
  }

  // rounded_away.
  FSDP_INLINED static void store_away(uint16_t* to, const Sixteen& values) {
    const auto rounded = [](float32x4_t first, float32x4_t second) {
      return vrshrn_high_n_u32(vrshrn_n_u32(as_bits(first), 16), as_bits(second), 16);
    };
    store(to, Halves{rounded(values.a, values.b), rounded(values.c, values.d)});
  }

  FSDP_INLINED static void store_stochastic(uint16_t* to, const Sixteen& values,
                                            const Halves& random) {
    store(to, upper_halves(sum(values, random)));
  }
};

// The core's own conversions, which are those of IEEE 754.
template <>
struct Codes<Fp16> {
  FSDP_INLINED static Sixteen load(const uint16_t* from) { return widened(vectors::load(from)); }

  FSDP_INLINED static Sixteen widened(const Halves& codes) {
    const auto low = [](uint16x8_t part) {
      return vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(part)));
    };
    const auto high = [](uint16x8_t part) {
      return vcvt_high_f32_f16(vreinterpretq_f16_u16(part));
    };
    return {low(codes.low), high(codes.low), low(codes.high), high(codes.high)};
  }

  FSDP_INLINED static void store_nearest(uint16_t* to, const Sixteen& values) {
    const auto rounded = [](float32x4_t first, float32x4_t second) {
      return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(first), second));
    };
    store(to, Halves{rounded(values.a, values.b), rounded(values.c, values.d)});
  }
  FSDP_INLINED static void store_exact(uint16_t* to, const Sixteen& values) {
    store_nearest(to, values);
  }

  FSDP_INLINED static void store_stochastic(uint16_t* to, const Sixteen& values,
                                            const Halves& random) {
    constexpr uint32_t kMinNormalBits = std::bit_cast<uint32_t>(Fp16::kMinNormal);
    // As NarrowFloat::lifted_magnitude says: bits counted from those of 0.
    const auto lifted = [](float32x4_t part) {
      const float32x4_t magnitude = vabsq_f32(part);
      const uint32x4_t is_subnormal = vcltq_f32(magnitude, vdupq_n_f32(Fp16::kMinNormal));
      const uint32x4_t by = vandq_u32(is_subnormal, vdupq_n_u32(kMinNormalBits));
      const uint32x4_t zero = vmaxq_u32(by, vdupq_n_u32(kMinNormalBits - (1u << 23)));
      return as_floats(vsubq_u32(as_bits(vaddq_f32(magnitude, as_floats(by))), zero));
    };
    const auto moved = [](uint16x8_t part) { return vshrq_n_u16(part, 3); };  // to what is dropped
    const Sixteen sums = sum(each(lifted, values), each_half(moved, random));
    const auto is_number = [](float32x4_t part) { return as_floats(vceqq_f32(part, part)); };
    const auto finished = [](uint16x8_t signs, uint16x8_t magnitude, uint16x8_t numbers) {
      const uint16x8_t bounded = vminq_u16(magnitude, vdupq_n_u16(0x7C00u));
      const uint16x8_t with_nan = vbslq_u16(numbers, bounded, vdupq_n_u16(0x7E00u));
      return vbslq_u16(vdupq_n_u16(0x8000u), signs, with_nan);
    };
    const auto cut = [](float32x4_t first, float32x4_t second) {  // or the largest
      return vqshrn_high_n_u32(vqshrn_n_u32(as_bits(first), 13), as_bits(second), 13);
    };
    store(to, each_half(finished, upper_halves(values),
                        Halves{cut(sums.a, sums.b), cut(sums.c, sums.d)},
                        lower_halves(each(is_number, values))));
  }
};

// fp8. As the upper half of an fp32 number, a code's magnitude shifted by kExponentBits stands for
// a number that is smaller by a power of two.
template <int kExponentBits, int kMantissaBits, TopExponent kTop>
struct Codes<NarrowFloat<uint8_t, kExponentBits, kMantissaBits, kTop>> {
  using Narrow = NarrowFloat<uint8_t, kExponentBits, kMantissaBits, kTop>;
  static constexpr float kSmaller = 0x1p-126f / Narrow::kMinNormal;

  FSDP_INLINED static Sixteen load(const uint8_t* from) {
    const uint8x16_t codes = vld1q_u8(from);
    if constexpr (kExponentBits == 5) {  // the upper halves of fp16
      const uint8x16_t zero = vdupq_n_u8(0);
      return Codes<Fp16>::widened(interleaved(zero, codes));
    } else {
      static_assert(kExponentBits == 4);
      const int8x16_t shifted = vshrq_n_s8(vreinterpretq_s8_u8(codes), 4);
      const uint8x16_t upper = vandq_u8(vreinterpretq_u8_s8(shifted), vdupq_n_u8(0x87u));
      const uint8x16_t with_sign = vorrq_u8(codes, vdupq_n_u8(0x80u));
      const uint8x16_t is_nan = vceqq_u8(with_sign, vdupq_n_u8(0xFFu));  // which NaN: no matter
      const Halves halves = interleaved(vshlq_n_u8(codes, 4), vorrq_u8(upper, is_nan));
      return product(Codes<Bf16>::widened(halves), vdupq_n_f32(1.0f / kSmaller));
    }
  }

  // Adding a number that is 2^(23 - kMantissaBits) times as large, and subtracting it again, rounds
  // to the mantissa's bits; subnormals are rounded as the smallest normal numbers are.
  FSDP_INLINED static void store_nearest(uint8_t* to, const Sixteen& values) {
    const auto rounded = [](float32x4_t part) {
      constexpr uint32_t kLarger = static_cast<uint32_t>(23 - kMantissaBits) << 23;
      constexpr uint32_t kHalf = 1u << 22;  // 1.5 times a power of two: both signs stay above it
      const uint32x4_t exponent = vandq_u32(as_bits(part), vdupq_n_u32(0x7F800000u));
      const uint32x4_t bounded = vmaxq_u32(exponent, as_bits(vdupq_n_f32(Narrow::kMinNormal)));
      const float32x4_t large = as_floats(vaddq_u32(bounded, vdupq_n_u32(kLarger + kHalf)));
      return vsubq_f32(vaddq_f32(part, large), large);
    };
    store(to, smaller(each(rounded, values)),
          upper_halves(values));  // (The sum of -1 and 1 is +0.)
  }

  FSDP_INLINED static void store_exact(uint8_t* to, const Sixteen& values) {
    const Halves upper = smaller(values);
    store(to, upper, upper);
  }

 private:
  FSDP_INLINED static Halves smaller(const Sixteen& values) {
    return upper_halves(product(values, vdupq_n_f32(kSmaller)));
  }
  FSDP_INLINED static void store(uint8_t* to, const Halves& magnitudes, const Halves& signs) {
    const auto moved = [](uint16x8_t magnitude, uint16x8_t sign) {
      return vbslq_u16(vdupq_n_u16(0x8000u), sign, vshlq_n_u16(magnitude, 8 - kExponentBits));
    };
    const Halves codes = each_half(moved, magnitudes, signs);
    vst1q_u8(to, vuzp2q_u8(vreinterpretq_u8_u16(codes.low), vreinterpretq_u8_u16(codes.high)));
  }
  FSDP_INLINED static Halves interleaved(uint8x16_t lower, uint8x16_t upper) {
    return {vreinterpretq_u16_u8(vzip1q_u8(lower, upper)),
            vreinterpretq_u16_u8(vzip2q_u8(lower, upper))};
  }
};

}  // namespace fsdp::vectors

#endif  // __aarch64__
