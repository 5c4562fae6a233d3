// Divides fp32 vectors by multiplications and rounds like a division, for cores whose one unit for
// divisions is what a loop waits for.
//
// Why it is exact: let D, an integer below 2^24, be the mantissa of d, and count in units in the
// last place of the quotient. y is 1 / d up to a relative error of 2^-24, so q is m / d up to 3/2,
// and r is m - d * q up to d / D. Then q + r * y, before it is rounded, is off by less than 5 / 2D.
// m / d lies k / 2D away from the middle between two numbers, k a whole number but 0, so that only
// quotients with |k| < 5 could be rounded to the wrong side. exact_quotient_test.cpp tries all
// reciprocals and all of those quotients. One pair of mantissas fails: a power of two divided by a
// number with all bits set.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace fsdp {

// Within these bounds and those of without_exact_quotients, nothing on the way leaves the range of
// normal numbers.
inline constexpr float kMinExactDivisor = 0x1p-60f;
inline constexpr float kMaxExactDivisor = 0x1p62f;

// 1 / d, nearly rounded. `one` is 1: it is overwritten, and where the caller loads it from memory,
// no register has to be copied.
[[gnu::always_inline]] inline float32x4_t close_reciprocal(float32x4_t d, float32x4_t one) {
  float32x4_t y = vrecpeq_f32(d);                // 8 bits
  y = vmulq_f32(y, vrecpsq_f32(d, y));           // 16
  return vfmaq_f32(y, y, vfmsq_f32(one, d, y));  // 24
}

// m / d.
[[gnu::always_inline]] inline float32x4_t exact_quotient(float32x4_t m, float32x4_t d,
                                                         float32x4_t one) {
  const float32x4_t y = close_reciprocal(d, one);
  const float32x4_t q = vmulq_f32(m, y);
  const float32x4_t r = vfmsq_f32(m, d, q);
  return vfmaq_f32(q, r, y);
}

// Two numbers in a general register, for tests beside vector units that have no time for them. (The
// empty statement keeps a compiler from making vectors of them again.)
[[gnu::always_inline]] inline uint64_t two_numbers(const float* values) {
  uint64_t bits = 0;
  std::memcpy(&bits, values, sizeof bits);
  asm("" : "+r"(bits));
  return bits;
}

// The tests below return 0 if all of kNumel numbers pass, so that one branch can ask for several.

// Dividends have exact quotients where 2^-63 <= |m| < 2^65 and m is no power of two: the two upper
// bits of such exponents differ, and other mantissas than 0 carry when ones are added.
template <int kNumel>
[[gnu::always_inline]] inline uint64_t without_exact_quotients(const float* dividends) {
  static_assert(kNumel % 2 == 0);
  constexpr uint64_t kTested = 0x607FFFFF'607FFFFFu;  // two bits of the exponent, the mantissa
  constexpr uint64_t kAdded = 0x207FFFFF'207FFFFFu;
  constexpr uint64_t kCarried = 0x40800000'40800000u;
  uint64_t all = kCarried;
  for (int i = 0; i < kNumel; i += 2) all &= (two_numbers(dividends + i) & kTested) + kAdded;
  return all ^ kCarried;
}

// Numbers, not negative, pass if they are below 2^65: the two upper bits of larger exponents, of
// Inf and of NaN are set.
template <int kNumel>
[[gnu::always_inline]] inline uint64_t at_least_2_to_65(const float* values) {
  static_assert(kNumel % 2 == 0);
  uint64_t any = 0;
  for (int i = 0; i < kNumel; i += 2) {
    const uint64_t bits = two_numbers(values + i);
    any |= bits & (bits << 1);
  }
  return any & 0x40000000'40000000u;
}

}  // namespace fsdp

#endif  // __aarch64__
