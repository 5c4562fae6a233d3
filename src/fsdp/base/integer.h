// Integer arithmetic on sizes: rounding, and operations that refuse to overflow.
#pragma once

#include <cstdint>
#include <numeric>

#include "fsdp/base/error.h"

namespace fsdp {

inline int64_t checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  FSDP_CHECK(!__builtin_add_overflow(a, b, &sum), "size overflow: ", a, " + ", b,
             " does not fit 64 bits");
  return sum;
}

inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  FSDP_CHECK(!__builtin_mul_overflow(a, b, &product), "size overflow: ", a, " * ", b,
             " does not fit 64 bits");
  return product;
}

// For non-negative values and positive divisors.
inline int64_t ceil_div(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return checked_mul(ceil_div(value, multiple), multiple);
}

inline int64_t checked_lcm(int64_t a, int64_t b) { return checked_mul(a / std::gcd(a, b), b); }

}  // namespace fsdp
