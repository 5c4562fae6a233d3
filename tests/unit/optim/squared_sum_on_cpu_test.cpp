// The sum of a gradient's squares, which its norm is the root of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/exact_sum.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "support/update_case.h"

namespace fsdp::squared_sum_on_cpu_test {
namespace {

TEST(SquaredSumOnCpu, AgreesWithASumInOrder) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const int64_t numel : {0, 1, 15, 16, 17, 5001}) {
      testing::UpdateMemory memory({.gradient = dtype}, numel, 0);
      memory.draw_gradients(2);
      double expected = 0;
      for (int64_t i = 0; i < numel; ++i)
        expected += std::pow(testing::decoded(dtype, memory.gradient.data(), i), 2);
      EXPECT_NEAR(squared_sum_on_cpu(memory.gradient.data(), dtype, numel), expected,
                  1e-13 * expected);
    }
}

TEST(SquaredSumOnCpu, IsFiniteIfAndOnlyIfAllNumbersAre) {
  std::vector<float> values(100, std::numeric_limits<float>::max());
  const double largest = std::numeric_limits<float>::max();
  EXPECT_NEAR(squared_sum_on_cpu(values.data(), DType::kFloat32, 100) / (100 * largest * largest),
              1.0, 1e-12);
  for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")})
    for (const size_t place : {0u, 50u, 99u}) {
      std::vector<float> with_bad = values;
      with_bad[place] = bad;
      EXPECT_FALSE(std::isfinite(squared_sum_on_cpu(with_bad.data(), DType::kFloat32, 100)));
    }
}

// --- exact sums ----------------------------------------------------------------------------------

using Digits = std::array<int64_t, ExactSum::kCount>;

Digits squares_of(const std::vector<float>& values, int64_t begin, int64_t end) {
  Digits digits{};
  add_exact_squares_on_cpu(values.data() + begin, DType::kFloat32, end - begin, digits.data());
  return digits;
}

// From the smallest numbers to the largest.
std::vector<float> numbers_of_all_sizes(int64_t count) {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> exponent(-149, 126);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(i % 7 == 0 ? 0.0f : std::exp2(exponent(random)) * (i % 2 == 0 ? 1.0f : -1.3f));
  return values;
}

TEST(ExactSum, IsOneForAllCutsAndOrders) {
  constexpr int64_t kNumel = 200 * kExactBlock + 17;
  const std::vector<float> values = numbers_of_all_sizes(kNumel);
  const Digits whole = squares_of(values, 0, kNumel);
  std::mt19937 random(5);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<Digits> parts;
    for (int64_t begin = 0; begin < kNumel;) {
      const int64_t end = std::min<int64_t>(
          kNumel, begin + kExactBlock * std::uniform_int_distribution<int64_t>(1, 40)(random));
      parts.push_back(squares_of(values, begin, end));
      begin = end;
    }
    std::shuffle(parts.begin(), parts.end(), random);
    Digits sum{};
    for (const Digits& part : parts)
      for (size_t digit = 0; digit < sum.size(); ++digit) sum[digit] += part[digit];
    EXPECT_EQ(sum, whole);
  }
}

TEST(ExactSum, IsTheSumToTheLastDigits) {
  for (const int64_t numel : {1, 127, 128, 5000}) {
    std::mt19937 random(static_cast<unsigned>(numel));
    std::normal_distribution<float> normal;
    std::vector<float> values;
    long double expected = 0;
    for (int64_t i = 0; i < numel; ++i) {
      values.push_back(normal(random) * 1e-3f);
      expected += static_cast<long double>(values.back()) * values.back();
    }
    const double sum = ExactSum::value_of(squares_of(values, 0, numel).data());
    EXPECT_NEAR(sum, static_cast<double>(expected), 1e-14 * static_cast<double>(expected));
  }
  // A block's sum is an fp64 number; alone it comes back as it was.
  for (const double value :
       {0.0, 1.0, 3.0, 0.1, 1e-80, 1e70, std::exp2(-298.0), std::exp2(262.0)}) {
    Digits digits{};
    ExactSum::place(
        value, [&](int digit, int64_t amount) { digits[static_cast<size_t>(digit)] += amount; });
    EXPECT_EQ(ExactSum::value_of(digits.data()), value);
  }
}

TEST(ExactSum, IsNoneIfANumberIsNotFinite) {
  std::vector<float> values(1000, 1.0f);
  EXPECT_EQ(ExactSum::value_of(squares_of(values, 0, 1000).data()), 1000.0);
  std::vector<float> large(1000, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(ExactSum::value_of(squares_of(large, 0, 1000).data())));
  for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
    values[500] = bad;
    EXPECT_TRUE(std::isnan(ExactSum::value_of(squares_of(values, 0, 1000).data())));
  }
}

TEST(SquaredSumOnCpu, SaysWhichTypeHasNone) {
  EXPECT_THAT([] { squared_sum_on_cpu(nullptr, DType::kInt32, 0); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("squared sum of int32")));
}

}  // namespace
}  // namespace fsdp::squared_sum_on_cpu_test
