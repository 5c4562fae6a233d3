// The random bits of counter_random.h for a block of elements, sixteen at a time (aarch64).
//
// The pairs of a window differ in their last bits alone, and the first shift of random_pair moves
// none of those into others: x ^ (x >> 16) of pair j is that of pair 0, ^ j. Its product with a
// constant is therefore a sum: of the upper bits' product, one for all, and the last bits', which
// stays the same for 2^16 pairs.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>

#include "fsdp/base/inlined.h"
#include "fsdp/optim/counter_random.h"
#include "fsdp/optim/narrow_vectors.h"

namespace fsdp {

class RandomVectors {
 public:
  RandomVectors(uint64_t seed, int64_t step, uint64_t group, RandomPurpose purpose)
      : seed_(seed), step_(step), group_(group), purpose_(purpose) {}

  // Positions in windows of so many elements.
  static constexpr int64_t kWindow = 1024;

  // To the window of a position.
  void move_to(int64_t position) {
    if (const int64_t high = position >> 32; high != high_) {
      key_ = random_key(seed_, step_, group_, purpose_, position);
      high_ = high;
    }
    const uint32_t x = (static_cast<uint32_t>(position / kWindow * kWindow) >> 1) ^ key_.first;
    const uint32_t mixed = x ^ (x >> 16);
    if (const uint32_t last = mixed % kPairs; last != last_) {
      for (uint32_t pair = 0; pair < kPairs; ++pair) products_[pair] = (last ^ pair) * kFirst;
      last_ = last;
    }
    product_ = (mixed - last_) * kFirst;
  }

  RandomKey key() const { return key_; }

  // The bits from a position on, for a loop: in registers, where no store can change them.
  class Bits {
   public:
    // random_bits of elements [i, i + 16) from there; all multiples of 16.
    FSDP_INLINED vectors::Halves at(int64_t i) const {
      return {four_pairs(products_ + i / 2), four_pairs(products_ + i / 2 + 4)};
    }

   private:
    FSDP_INLINED uint16x8_t four_pairs(const uint32_t* products) const {
      uint32x4_t x = vaddq_u32(vld1q_u32(products), product_);
      x = vaddq_u32(veorq_u32(x, vshrq_n_u32(x, 15)), key_);
      x = vmulq_u32(x, vdupq_n_u32(kSecond));
      return vreinterpretq_u16_u32(veorq_u32(x, vshrq_n_u32(x, 16)));
    }

    friend class RandomVectors;
    Bits(const RandomVectors& random, int64_t position)
        : products_(random.products_ + position % kWindow / 2),
          product_(vdupq_n_u32(random.product_)),
          key_(vdupq_n_u32(random.key_.second)) {}

    const uint32_t* products_;
    uint32x4_t product_;
    uint32x4_t key_;
  };
  FSDP_INLINED Bits from(int64_t position) const { return Bits(*this, position); }

 private:
  static constexpr uint32_t kPairs = kWindow / 2;
  static constexpr uint32_t kFirst = 0x7FEB352Du;  // random_pair's
  static constexpr uint32_t kSecond = 0x846CA68Bu;

  uint64_t seed_;
  int64_t step_;
  uint64_t group_;
  RandomPurpose purpose_;

  int64_t high_ = -1;  // the key's position >> 32
  RandomKey key_;
  uint32_t last_ = kPairs;     // none yet
  uint32_t products_[kPairs];  // of the last bits
  uint32_t product_ = 0;       // of the others
};

}  // namespace fsdp

#endif  // __aarch64__
