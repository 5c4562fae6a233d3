// Arithmetic of whole numbers: sizes that are rounded or refuse to overflow, and bits that are
// mixed.
#pragma once

#include <cstdint>
#include <numeric>

#include "fsdp/base/check.h"
#include "fsdp/base/compiler.h"

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

constexpr bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// For non-negative values and positive divisors.
inline int64_t ceil_div(int64_t value, int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return checked_mul(ceil_div(value, multiple), multiple);
}

inline int64_t checked_lcm(int64_t a, int64_t b) { return checked_mul(a / std::gcd(a, b), b); }

// A bijection of 64 bits in which every bit of the result depends on all bits of the argument. Zero
// stays zero.
FSDP_HOST_DEVICE inline uint64_t mixed_bits(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 32);
}

}  // namespace fsdp
