// Sums of fp64 numbers that do not depend on the order in which they are added, nor on who adds
// which: fixed-point numbers of many digits, which whole-number additions make exact.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "fsdp/base/compiler.h"

namespace fsdp {

// Digit i counts multiples of 2^(32 i - kBelowPoint), and holds more than 32 bits: carries are left
// to whoever reads the sum, so that 2^31 numbers may be added digit by digit, in any order and on
// any number of ranks. The last one counts numbers that are no sum: NaN, Inf, and those beyond the
// digits. What lies below them is cut off, which is alike everywhere, too.
struct ExactSum {
  static constexpr int kDigits = 22;
  static constexpr int kCount = kDigits + 1;
  // Squares of fp32 numbers begin at 2^-298 and end before 2^256.
  static constexpr int kBelowPoint = 352;

  // Calls add(index, amount) for the digits of a number that is not negative.
  template <typename Add>
  FSDP_HOST_DEVICE static void place(double value, const Add& add) {
    constexpr int kMantissaBits = 52;
    constexpr int kBias = 1023;
    const auto bits = std::bit_cast<uint64_t>(value);
    const auto exponent = static_cast<int>(bits >> kMantissaBits);
    if (exponent == 0) return;  // nothing, or next to nothing
    const int lowest = exponent - kBias - kMantissaBits + kBelowPoint;
    const int first = lowest / 32;
    if (exponent > 2 * kBias || first + 2 >= kDigits) return add(kDigits, 1);
    if (lowest < 0) return;
    const uint64_t one = uint64_t{1} << kMantissaBits;
    const uint64_t mantissa = (bits & (one - 1)) | one;
    const uint64_t low = (mantissa & 0xFFFFFFFFu) << (lowest % 32);
    const uint64_t high = ((mantissa >> 32) << (lowest % 32)) + (low >> 32);
    add(first, static_cast<int64_t>(low & 0xFFFFFFFFu));
    add(first + 1, static_cast<int64_t>(high & 0xFFFFFFFFu));
    add(first + 2, static_cast<int64_t>(high >> 32));
  }

  // The factor of each digit, from the lowest; the value is the sum of digits times factors in that
  // order, or NaN.
  static double factor(int digit) { return std::ldexp(1.0, 32 * digit - kBelowPoint); }
  static double value_of(const int64_t* digits) {
    if (digits[kDigits] != 0) return std::numeric_limits<double>::quiet_NaN();
    double value = 0.0;
    for (int digit = 0; digit < kDigits; ++digit)
      value += static_cast<double>(digits[digit]) * factor(digit);
    return value;
  }
};

// Elements whose squares are added in fp64, in a fixed order, before they enter an exact sum.
inline constexpr int64_t kExactBlock = 128;

}  // namespace fsdp
