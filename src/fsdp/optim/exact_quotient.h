// fp32 quotients by multiplications that round like a division, for cores whose one unit for
// divisions is what a loop waits for. m / d is, in the steps of overlapped_operations.h:
//
//     y = estimate of 1 / d (8 bits);  y = y * (2 - d * y) (16);  y = y + y * (1 - d * y) (24)
//     q = m * y;  r = m - d * q;  q = q + r * y
//
// Why it is exact: let D, an integer below 2^24, be the mantissa of d, and count in units in the
// last place of the quotient. y is 1 / d up to a relative error of 2^-24, so q is m / d up to 3/2,
// and r is m - d * q up to d / D. Then q + r * y, before it is rounded, is off by less than 5 / 2D.
// m / d lies k / 2D away from the middle between two numbers, k a whole number but 0, so that only
// quotients with |k| < 5 could be rounded to the wrong side. exact_quotient_test.cpp tries all
// reciprocals and all of those quotients. One pair of mantissas fails: a power of two divided by a
// number with all bits set.
#pragma once

#include <cstdint>

namespace fsdp {

// Within these bounds and those of ExactQuotientTest, nothing on the way leaves the range of
// normal numbers.
inline constexpr float kMinExactDivisor = 0x1p-60f;
inline constexpr float kMaxExactDivisor = 0x1p62f;

// Which moments, two in a word, have exact quotients. Second ones, which divisors are made of, pass
// if they are below 2^65: both upper bits of larger exponents, of Inf and of NaN are set.
struct ExactQuotientTest {
  // Dividends pass where 2^-63 <= |m| < 2^65 and m is no power of two: the two upper bits of such
  // exponents differ, and other mantissas than 0 carry when ones are added.
  static constexpr uint64_t kTested = 0x607FFFFF'607FFFFFu;  // the two bits, and the mantissa
  static constexpr uint64_t kAdded = 0x207FFFFF'207FFFFFu;
  static constexpr uint64_t kCarried = 0x40800000'40800000u;  // in the sum
};

}  // namespace fsdp
