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

namespace fsdp {

// Within these bounds and those of ExactQuotientTest, nothing on the way leaves the range of
// normal numbers.
inline constexpr float kMinExactDivisor = 0x1p-60f;
inline constexpr float kMaxExactDivisor = 0x1p62f;

// The operations of m / d, one by one in this order, so that a loop can do others between them.
struct ExactQuotient {
  float32x4_t m, y, e, one, q;

  [[gnu::always_inline]] void estimate(float32x4_t d) { y = vrecpeq_f32(d); }  // 8 bits of 1 / d
  [[gnu::always_inline]] void estimate_error(float32x4_t d) { e = vrecpsq_f32(d, y); }
  [[gnu::always_inline]] void reciprocal() { y = vmulq_f32(y, e); }  // 16
  [[gnu::always_inline]] void reciprocal_error(float32x4_t d) { one = vfmsq_f32(one, d, y); }
  [[gnu::always_inline]] void close_reciprocal() { y = vfmaq_f32(y, y, one); }  // 24
  [[gnu::always_inline]] void quotient() { q = vmulq_f32(m, y); }
  [[gnu::always_inline]] void remainder(float32x4_t d) { m = vfmsq_f32(m, d, q); }
  [[gnu::always_inline]] void exact_quotient() { q = vfmaq_f32(q, m, y); }
};

// All of them: q is m / d then, and y nearly 1 / d.
[[gnu::always_inline]] inline ExactQuotient divided_exactly(float32x4_t m, float32x4_t d) {
  ExactQuotient of{.m = m, .y = {}, .e = {}, .one = vdupq_n_f32(1.0f), .q = {}};
  of.estimate(d);
  of.estimate_error(d);
  of.reciprocal();
  of.reciprocal_error(d);
  of.close_reciprocal();
  of.quotient();
  of.remainder(d);
  of.exact_quotient();
  return of;
}

// Four numbers in general registers, for tests beside vector units that have no time for them. From
// memory, in words that a compiler must believe: it would take numbers that were just stored from
// vector registers.
struct FourNumbers {
  uint64_t low;
  uint64_t high;
};
[[gnu::always_inline]] inline FourNumbers four_numbers(const float* values) {
  FourNumbers four;
  const auto& memory = *reinterpret_cast<const float(*)[4]>(values);
#if defined(__clang__)
  asm("ldp %0, %1, %2" : "=r"(four.low), "=r"(four.high) : "Q"(memory));
#else
  asm("ldp %0, %1, %2" : "=r"(four.low), "=r"(four.high) : "Ump"(memory));
#endif
  return four;
}

// Whether quotients are exact, asked for four numbers at a time, answered at the end.
class ExactQuotientTest {
 public:
  static constexpr uint64_t kTested =
      0x607FFFFF'607FFFFFu;  // two bits of the exponent, the mantissa
  static constexpr uint64_t kAdded = 0x207FFFFF'207FFFFFu;
  static constexpr uint64_t kCarried = 0x40800000'40800000u;

  // Dividends pass where 2^-63 <= |m| < 2^65 and m is no power of two: the two upper bits of such
  // exponents differ, and other mantissas than 0 carry when ones are added.
  [[gnu::always_inline]] void take_dividends(const float* values) {
    const auto [low, high] = four_numbers(values);
    carried_ &= (low & kTested) + kAdded;
    carried_ &= (high & kTested) + kAdded;
  }

  // Numbers, not negative, that divisors are made of pass if they are below 2^65: the two upper
  // bits of larger exponents, of Inf and of NaN are set.
  [[gnu::always_inline]] void take_second_moments(const float* values) {
    const auto [low, high] = four_numbers(values);
    large_ |= low & (low << 1);
    large_ |= high & (high << 1);
  }

  [[gnu::always_inline]] bool passes() const {
    constexpr uint64_t kLarge = 0x40000000'40000000u;
    return ((kCarried & ~carried_) | (large_ & kLarge)) == 0;
  }

 private:
  uint64_t carried_ = kCarried;
  uint64_t large_ = 0;
};

}  // namespace fsdp

#endif  // __aarch64__
