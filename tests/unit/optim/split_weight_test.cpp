// Both halves of a weight lead back to it, bit for bit.
#include "fsdp/optim/kernels/split_weight.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace fsdp::split_weight_test {
namespace {

// Zero, subnormal, even and odd, around powers of two, the largest, Inf and NaN; both signs.
std::vector<uint32_t> upper_halves() {
  std::vector<uint32_t> halves;
  for (const uint32_t sign : {0u, 0x8000u}) {
    for (const uint32_t half : {0x0000u, 0x0001u, 0x007Eu, 0x007Fu, 0x0080u, 0x0081u, 0x1234u,
                                0x1235u, 0x3F7Eu, 0x3F7Fu, 0x3F80u, 0x3F81u, 0x3FFFu, 0x4000u,
                                0x7F7Eu, 0x7F7Fu, 0x7F80u, 0x7F81u, 0x7FBFu, 0x7FC0u, 0x7FFFu})
      halves.push_back(sign | half);
  }
  return halves;
}

TEST(SplitWeight, IsTheNearestBf16WithTiesAwayFromZeroAndLeadsBack) {
  for (const uint32_t upper : upper_halves()) {
    for (uint32_t lower = 0; lower < 0x10000u; ++lower) {
      const uint32_t bits = (upper << 16) | lower;
      const auto value = std::bit_cast<float>(bits);
      const SplitWeight split = split_weight(value);
      const float joined = join_weight(split);
      if (std::isnan(value)) {
        ASSERT_EQ(split.upper, 0x7FC0u) << std::hex << bits;
        ASSERT_TRUE(std::isnan(joined)) << std::hex << bits;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(joined), bits) << std::hex << bits;
      }
      ASSERT_EQ(split.upper, rounded_away(value)) << std::hex << bits;
      if (std::isnan(value) || (upper & 0x7FFFu) >= 0x7F7Fu) continue;
      const auto below = std::bit_cast<float>(upper << 16);  // towards zero
      const auto above = std::bit_cast<float>((upper + 1) << 16);
      const auto chosen = std::bit_cast<float>(static_cast<uint32_t>(split.upper) << 16);
      const double to_below = std::abs(static_cast<double>(value) - below);
      const double to_above = std::abs(static_cast<double>(above) - value);
      ASSERT_EQ(chosen, to_below < to_above ? below : above) << value;
    }
  }
}

TEST(SplitWeight, RoundsTheLargestNumbersToInfAndBack) {
  const SplitWeight split = split_weight(std::numeric_limits<float>::max());
  EXPECT_EQ(split.upper, 0x7F80u);
  EXPECT_EQ(split.remainder, -1);
  EXPECT_EQ(join_weight(split), std::numeric_limits<float>::max());
}

}  // namespace
}  // namespace fsdp::split_weight_test
