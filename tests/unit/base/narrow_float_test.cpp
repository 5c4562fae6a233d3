// Narrow types: every code, every tie, and the mean of stochastic rounding.
#include "fsdp/base/narrow_float.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "fsdp/optim/kernels/update_math.h"
#include "support/update_case.h"

namespace fsdp::narrow_float_test {
namespace {

template <typename Narrow>
struct TypeOf;
template <>
struct TypeOf<Fp16> {
  static constexpr DType kType = DType::kFloat16;
};
template <>
struct TypeOf<Bf16> {
  static constexpr DType kType = DType::kBFloat16;
};
template <>
struct TypeOf<Fp8E4M3> {
  static constexpr DType kType = DType::kFloat8E4M3;
};
template <>
struct TypeOf<Fp8E5M2> {
  static constexpr DType kType = DType::kFloat8E5M2;
};

template <typename Narrow>
class NarrowFloatTest : public ::testing::Test {
 public:
  using Code = typename Narrow::Code;
  static constexpr uint32_t kCodes = 1u << (8 * sizeof(Code));
  static constexpr uint32_t kSign = kCodes / 2;

  static double decoded(Code code) { return testing::decoded(TypeOf<Narrow>::kType, &code, 0); }
  static bool is_finite(uint32_t code) { return std::isfinite(decoded(static_cast<Code>(code))); }
};

using NarrowTypes = ::testing::Types<Fp16, Bf16, Fp8E4M3, Fp8E5M2>;
TYPED_TEST_SUITE(NarrowFloatTest, NarrowTypes);

TYPED_TEST(NarrowFloatTest, WidensEveryCodeAndLeadsBackToIt) {
  for (uint32_t bits = 0; bits < TestFixture::kCodes; ++bits) {
    const auto code = static_cast<typename TypeParam::Code>(bits);
    const double expected = TestFixture::decoded(code);
    const float widened = TypeParam::widened(code);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened)) << bits;
      ASSERT_TRUE(std::isnan(TypeParam::widened(TypeParam::nearest(widened)))) << bits;
      ASSERT_TRUE(std::isnan(TypeParam::widened(TypeParam::stochastic(widened, 0xFFFFu)))) << bits;
      continue;
    }
    ASSERT_EQ(widened, expected) << bits;
    ASSERT_EQ(std::signbit(widened), std::signbit(expected)) << bits;
    ASSERT_EQ(TypeParam::nearest(widened), code) << bits;
    ASSERT_EQ(TypeParam::stochastic(widened, 0), code) << bits;
    ASSERT_EQ(TypeParam::stochastic(widened, 0xFFFFu), code) << "exact numbers have one neighbour";
  }
}

TYPED_TEST(NarrowFloatTest, RoundsToTheNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits + 1 < TestFixture::kSign; ++bits) {
    if (!TestFixture::is_finite(bits) || !TestFixture::is_finite(bits + 1)) continue;
    const auto low = static_cast<typename TypeParam::Code>(bits);
    const auto high = static_cast<typename TypeParam::Code>(bits + 1);
    const auto middle =
        static_cast<float>((TestFixture::decoded(low) + TestFixture::decoded(high)) / 2);
    const auto sign = static_cast<typename TypeParam::Code>(TestFixture::kSign);
    const auto even = bits % 2 == 0 ? low : high;
    ASSERT_EQ(TypeParam::nearest(middle), even) << middle;
    ASSERT_EQ(TypeParam::nearest(std::nextafter(middle, 0.0f)), low) << middle;
    ASSERT_EQ(TypeParam::nearest(std::nextafter(middle, HUGE_VALF)), high) << middle;
    ASSERT_EQ(TypeParam::nearest(-middle), even | sign) << middle;
  }
}

TYPED_TEST(NarrowFloatTest, StochasticRoundingChoosesANeighbourWithTheRightMean) {
  constexpr int kDraws = 4096;
  // Normal numbers, and subnormal ones of the scaled types.
  for (const double value : {1.03, -0.7, 1.0 / 3, -1e-3, 3e-7, 2.1e-6}) {
    const auto x = static_cast<float>(value);
    const double step = testing::spacing(TypeOf<TypeParam>::kType, value);
    double sum = 0;
    for (uint32_t draw = 0; draw < kDraws; ++draw) {
      const uint32_t random = random_bits({.first = 17, .second = 4}, draw);
      const double rounded = TypeParam::widened(TypeParam::stochastic(x, random));
      ASSERT_LT(std::abs(rounded - value), step * (1 + 1e-6)) << value;
      sum += rounded;
    }
    // Standard deviation of one draw <= step / 2; five of them for the mean.
    EXPECT_NEAR(sum / kDraws, value, 5 * step / 2 / std::sqrt(kDraws)) << value;
  }
}

template <typename Narrow>
void expect_neighbours() {
  const auto least = std::bit_cast<uint32_t>(Narrow::kMinNormal);
  const auto most = std::bit_cast<uint32_t>(Narrow::kMax);
  for (uint32_t bits = least; bits <= most; bits += 1021) {
    const auto value = std::bit_cast<float>(bits);
    const auto expected = Narrow::neighbours(value);
    const auto found = Narrow::normal_neighbours(value);
    ASSERT_EQ(found.below, expected.below) << value;
    ASSERT_EQ(found.above, expected.above) << value;
    ASSERT_EQ(Narrow::nearest(found.below), expected.code_below) << value;
    ASSERT_LE(found.below, value);
    ASSERT_GT(found.above, value);
  }
}

TEST(NarrowFloat, NormalNumbersHaveTheNeighboursOfAnyNumber) {
  expect_neighbours<Fp16>();
  expect_neighbours<Fp8E4M3>();
  expect_neighbours<Fp8E5M2>();
}

TEST(NarrowFloat, OverflowsToInfOrNan) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float large : {65520.0f, 1e30f, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(Fp16::widened(Fp16::nearest(large)), kInf) << large;
    EXPECT_EQ(Fp16::widened(Fp16::nearest(-large)), -kInf) << large;
    EXPECT_TRUE(std::isnan(Fp8E4M3::widened(Fp8E4M3::nearest(large)))) << large;
    EXPECT_EQ(Fp8E5M2::widened(Fp8E5M2::nearest(large)), kInf) << large;
  }
  EXPECT_EQ(Fp16::widened(Fp16::nearest(65519.0f)), Fp16::kMax);
  EXPECT_EQ(Fp8E4M3::kMax, 448.0f);
  EXPECT_EQ(Fp8E5M2::kMax, 57344.0f);
  EXPECT_EQ(Bf16::widened(Bf16::nearest(std::numeric_limits<float>::max())), kInf);
  EXPECT_EQ(Bf16::widened(Bf16::nearest(kInf)), kInf);
  EXPECT_EQ(Bf16::widened(Bf16::stochastic(-kInf, 0xFFFFu)), -kInf);
}

TEST(CounterRandom, BitsAreBalancedAndDifferByKey) {
  const RandomKey key = random_key(1, 2, 3, RandomPurpose::kWeight, 0);
  const RandomKey next = random_key(1, 3, 3, RandomPurpose::kWeight, 0);
  constexpr uint32_t kDraws = 1u << 14;
  std::vector<int> ones(16), same(16), kept(16);
  for (uint32_t position = 0; position < kDraws; ++position) {
    const uint32_t bits = random_bits(key, position);
    const uint32_t of_next_step = random_bits(next, position);
    const uint32_t of_neighbour = random_bits(key, position + 1);
    for (size_t bit = 0; bit < 16; ++bit) {
      ones[bit] += (bits >> bit) & 1u;
      same[bit] += (~(bits ^ of_next_step) >> bit) & 1u;
      kept[bit] += (~(bits ^ of_neighbour) >> bit) & 1u;
    }
  }
  // Standard deviation of a count is sqrt(kDraws) / 2 = 64.
  for (size_t bit = 0; bit < 16; ++bit) {
    EXPECT_NEAR(ones[bit], kDraws / 2, 5 * 64) << bit;
    EXPECT_NEAR(same[bit], kDraws / 2, 5 * 64) << bit;
    EXPECT_NEAR(kept[bit], kDraws / 2, 5 * 64) << bit;
  }
}

TEST(CounterRandom, KeyKnowsEverythingButTheLowerHalfOfThePosition) {
  const auto bits = [](uint64_t seed, int64_t step, uint64_t group, RandomPurpose purpose,
                       int64_t position) {
    return random_bits(random_key(seed, step, group, purpose, position),
                       static_cast<uint32_t>(position));
  };
  const uint32_t base = bits(1, 2, 3, RandomPurpose::kWeight, 4);
  EXPECT_EQ(bits(1, 2, 3, RandomPurpose::kWeight, 4), base);
  EXPECT_NE(bits(9, 2, 3, RandomPurpose::kWeight, 4), base);
  EXPECT_NE(bits(1, 9, 3, RandomPurpose::kWeight, 4), base);
  EXPECT_NE(bits(1, 2, 9, RandomPurpose::kWeight, 4), base);
  EXPECT_NE(bits(1, 2, 3, RandomPurpose::kSecondMoment, 4), base);
  EXPECT_NE(bits(1, 2, 3, RandomPurpose::kWeight, 9), base);
  EXPECT_NE(bits(1, 2, 3, RandomPurpose::kWeight, 4 + (int64_t{1} << 32)), base);
}

}  // namespace
}  // namespace fsdp::narrow_float_test
