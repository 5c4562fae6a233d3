// Quotients by multiplications against the machine's division: every divisor, every quotient that
// is hard to round, the ends of the range, and random ones.
#include "fsdp/optim/exact_quotient.h"

#include <gtest/gtest.h>

#if defined(__aarch64__)

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace fsdp {
namespace {

bool have_exact_quotients(const std::vector<float>& dividends) {
  ExactQuotientTest test;
  for (size_t i = 0; i < dividends.size(); i += 4) test.take_dividends(&dividends[i]);
  return test.passes();
}

bool are_second_moments_small(const std::vector<float>& values) {
  ExactQuotientTest test;
  for (size_t i = 0; i < values.size(); i += 4) test.take_second_moments(&values[i]);
  return test.passes();
}

constexpr uint32_t kOne = 1u << 23;  // mantissas are integers from here to 2 * kOne
constexpr uint32_t kAllBits = 2 * kOne - 1;

float of_mantissa(uint32_t mantissa) { return std::ldexp(static_cast<float>(mantissa), -23); }

// Compares quotients four at a time.
class Comparison {
 public:
  void add(float dividend, float divisor) {
    dividends_[count_] = dividend;
    divisors_[count_] = divisor;
    if (++count_ == 4) compare();
  }
  int64_t num_compared() const { return num_compared_; }
  int64_t num_wrong() const { return num_wrong_; }

  // What is left over is compared together with 1.5 / 1.25.
  void finish() {
    while (count_ != 0) add(1.5f, 1.25f);
  }

 private:
  void compare() {
    const float32x4_t m = vld1q_f32(dividends_);
    const float32x4_t d = vld1q_f32(divisors_);
    const uint32x4_t ours = vreinterpretq_u32_f32(divided_exactly(m, d).q);
    const uint32x4_t expected = vreinterpretq_u32_f32(vdivq_f32(m, d));
    const uint32x4_t same = vceqq_u32(ours, expected);
    num_wrong_ += 4 - vaddvq_u32(vshrq_n_u32(same, 31));
    num_compared_ += 4;
    count_ = 0;
  }

  float dividends_[4];
  float divisors_[4];
  int count_ = 0;
  int64_t num_compared_ = 0;
  int64_t num_wrong_ = 0;
};

// 1 / 2^power modulo an odd number.
uint64_t inverse_power_of_two(int power, uint64_t odd) {
  uint64_t x = 1;
  for (int i = 0; i < power; ++i) x = (x % 2 == 0 ? x : x + odd) / 2;
  return x;
}

// Calls body(M) for the mantissas M of dividends whose quotient by D lies k / 2D of a unit in the
// last place from the middle N + 1/2 between two numbers, |k| up to 5:
//     M * 2^(e + 1) = D * (2 N + 1) + k,  e = 23 where M >= D, 24 where it is smaller.
// Where D = 2^twos * odd, k is a multiple of 2^twos, too; below it is k without them. That gives M
// modulo `odd`. (Some of these have an even number in place of 2 N + 1 and are easy.)
template <typename Body>
void for_each_hard_dividend(uint32_t divisor, Body body) {
  const int twos = std::countr_zero(divisor);
  const uint64_t odd = divisor >> twos;
  if (odd == 1) return;  // powers of two divide without rounding
  for (const int e : {23, 24}) {
    const uint64_t inverse = inverse_power_of_two(e + 1 - twos, odd);
    for (uint64_t k = 1; (k << twos) <= 5; ++k) {
      const uint64_t above = k * inverse % odd;
      for (const uint64_t residue : {above, odd - above})
        for (uint64_t m = residue + (kOne - residue + odd - 1) / odd * odd; m < 2 * kOne; m += odd)
          if ((m >= divisor) == (e == 23)) body(static_cast<uint32_t>(m));
    }
  }
}

// --- the proof's parts ---------------------------------------------------------------------------

TEST(ExactQuotient, ReciprocalsOfAllMantissasAreWithinTwoToTheMinus24) {
  double worst = 0;
  for (uint32_t mantissa = kOne; mantissa < 2 * kOne; mantissa += 4) {
    const float divisors[4] = {of_mantissa(mantissa), of_mantissa(mantissa + 1),
                               of_mantissa(mantissa + 2), of_mantissa(mantissa + 3)};
    float reciprocals[4];
    vst1q_f32(reciprocals, divided_exactly(vdupq_n_f32(1.0f), vld1q_f32(divisors)).y);
    for (int i = 0; i < 4; ++i)
      worst = std::max(worst, std::abs(static_cast<double>(reciprocals[i]) * divisors[i] - 1.0));
  }
  EXPECT_LE(worst, 0x1p-24);
}

TEST(ExactQuotient, RoundsTheHardestQuotientsOfAllDivisors) {
  Comparison comparison;
  for (uint32_t divisor = kOne; divisor < 2 * kOne; ++divisor)
    for_each_hard_dividend(divisor, [&](uint32_t dividend) {
      if (dividend == kOne) return;  // see the next test
      comparison.add(of_mantissa(dividend), of_mantissa(divisor));
    });
  comparison.finish();
  EXPECT_GT(comparison.num_compared(), 20'000'000);
  EXPECT_EQ(comparison.num_wrong(), 0);
}

TEST(ExactQuotient, OnePairOfMantissasIsWrongAndItsDividendIsRefused) {
  Comparison comparison;
  for (uint32_t divisor = kOne; divisor < kAllBits; ++divisor)
    comparison.add(1.0f, of_mantissa(divisor));
  comparison.finish();
  EXPECT_EQ(comparison.num_wrong(), 0);
  for (int i = 0; i < 4; ++i) comparison.add(1.0f, of_mantissa(kAllBits));
  EXPECT_EQ(comparison.num_wrong(), 4);
  EXPECT_FALSE(have_exact_quotients({1.0f, 1.5f, 1.5f, 1.5f}));
}

// --- the range -----------------------------------------------------------------------------------

TEST(ExactQuotient, RoundsAtTheEndsOfTheRange) {
  Comparison comparison;
  const float dividends[] = {
      std::nextafter(0x1p-63f, 1.0f), 0x1.5p-63f, 0x1.fffffep-63f, 0x1.000002p0f, 0x1.000002p64f,
      std::nextafter(0x1p65f, 1.0f)};
  const float divisors[] = {kMinExactDivisor, 0x1.fffffep-60f, 0x1.000002p-60f, 0x1.8p0f,
                            0x1.fffffep61f,   0x1.000002p61f,  kMaxExactDivisor};
  for (const float m : dividends) {
    EXPECT_TRUE(have_exact_quotients({m, -m, m, -m})) << m;
    for (const float d : divisors)
      for (const float sign : {1.0f, -1.0f}) {
        comparison.add(m, sign * d);
        comparison.add(-m, sign * d);
      }
  }
  comparison.finish();
  EXPECT_EQ(comparison.num_wrong(), 0);
}

TEST(ExactQuotient, RoundsRandomQuotientsOfAllExponents) {
  std::mt19937_64 random(7);
  Comparison comparison;
  for (int i = 0; i < 20'000'000; ++i) {
    const uint64_t bits = random();
    const auto dividend = static_cast<uint32_t>(64 + (bits & 127)) << 23;      // 2^-63 to 2^64
    const auto divisor = static_cast<uint32_t>(67 + (bits >> 7) % 121) << 23;  // 2^-60 to 2^60
    const auto low = static_cast<uint32_t>(bits >> 14) & 0x807FFFFFu;
    const auto high = static_cast<uint32_t>(bits >> 32) & 0x807FFFFFu;
    comparison.add(std::bit_cast<float>(dividend | low), std::bit_cast<float>(divisor | high | 1u));
  }
  comparison.finish();
  EXPECT_EQ(comparison.num_wrong(), 0);
}

TEST(ExactQuotient, RefusesDividendsOutOfRangeInAnyPlace) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float refused[] = {0.0f,      -0.0f, 0x1p-149f, 0x1.8p-130f, std::nextafter(0x1p-63f, 0.0f),
                           0x1.8p65f, 3e38f, kInf,      NAN,         0x1p-10f,
                           -1.0f,     -kInf, -NAN,      -0x1.8p-64f, std::bit_cast<float>(~0u)};
  for (const float value : refused)
    for (int place = 0; place < 8; ++place) {
      std::vector<float> values = {0.1f, -0.3f, 1e-18f, 7e18f, -3e-5f, 11.0f, -1.0000001f, 0.7f};
      EXPECT_TRUE(have_exact_quotients(values));
      values[static_cast<size_t>(place)] = value;
      EXPECT_FALSE(have_exact_quotients(values)) << value << " at " << place;
    }
}

TEST(ExactQuotient, BoundsNumbersAnyOfWhichMayBeTooLarge) {
  for (const float value : {0x1p65f, 3e38f, std::numeric_limits<float>::infinity(), NAN})
    for (int place = 0; place < 8; ++place) {
      std::vector<float> values = {0.0f, 1e-45f, 1e-18f, 7e18f, 3e-5f, 0x1.fffffep64f, 1.0f, 0.7f};
      EXPECT_TRUE(are_second_moments_small(values));
      values[static_cast<size_t>(place)] = value;
      EXPECT_FALSE(are_second_moments_small(values)) << value << " at " << place;
    }
}

}  // namespace
}  // namespace fsdp

#else

TEST(ExactQuotient, IsForAarch64) { GTEST_SKIP() << "Other machines divide by their own unit."; }

#endif
