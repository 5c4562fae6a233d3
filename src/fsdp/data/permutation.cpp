#include "fsdp/data/permutation.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/mixed_bits.h"

namespace fsdp {
namespace {

// Even, so that halves of unequal length are where they began; 4 are enough for a permutation that
// cannot be told from a random one when halves are long, more when they are short.
constexpr uint64_t kRounds = 8;
// Halves of less than 4 bits know too few functions; small sizes are walked to a little longer.
constexpr int kMinBits = 8;

constexpr uint64_t low_bits(uint64_t value, int num_bits) {
  return value & ((uint64_t{1} << num_bits) - 1);
}

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t round)
    : size_(size),
      key_(mixed_bits(mixed_bits(seed + 0x9E3779B97F4A7C15ull) + round)),
      lower_bits_(0),
      upper_bits_(0) {
  FSDP_ASSERT(size >= 1, size);
  const int bits =
      std::max(kMinBits, static_cast<int>(std::bit_width(static_cast<uint64_t>(size) - 1)));
  upper_bits_ = bits / 2;
  lower_bits_ = bits - upper_bits_;
}

uint64_t Permutation::permuted(uint64_t value) const {
  uint64_t upper = value >> lower_bits_;
  uint64_t lower = low_bits(value, lower_bits_);
  int upper_bits = upper_bits_;
  int lower_bits = lower_bits_;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const uint64_t noise = mixed_bits(key_ + round * 0x9E3779B97F4A7C15ull + lower);
    const uint64_t next = upper ^ low_bits(noise, upper_bits);
    upper = std::exchange(lower, next);
    std::swap(upper_bits, lower_bits);
  }
  return upper << lower_bits_ | lower;
}

int64_t Permutation::operator()(int64_t index) const {
  FSDP_ASSERT(index >= 0 && index < size_, index, " of ", size_);
  if (size_ == 1) return 0;
  // Ends: a cycle of the larger permutation comes back to `index`, which is below size.
  auto value = static_cast<uint64_t>(index);
  do value = permuted(value);
  while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

}  // namespace fsdp
