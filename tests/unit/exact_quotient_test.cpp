// Quotients by multiplications, as the code in use computes them, against the machine's division:
// every divisor, every quotient that is hard to round, the ends of the range, and random ones.
#include "fsdp/optim/exact_quotient.h"

#include <gtest/gtest.h>

#if defined(__aarch64__)

#include <arm_neon.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "fsdp/optim/default_nan.h"
#include "fsdp/optim/overlapped_orders.h"
#include "support/runnable_code.h"

namespace fsdp {
namespace {

using overlapped::FourFloats;
using overlapped::Frame;
using overlapped::kGroup;

constexpr uint32_t kOne = 1u << 23;  // mantissas are integers from here to 2 * kOne
constexpr uint32_t kAllBits = 2 * kOne - 1;

float of_mantissa(uint32_t mantissa) { return std::ldexp(static_cast<float>(mantissa), -23); }

// --- quotients by the code in use ----------------------------------------------------------------

constexpr int kHalf = kGroup / 2;
static_assert(kHalf == 4 * overlapped::kMultiplied);

overlapped::Code code_for_whole_weights() {
  for (const overlapped::Found& found : overlapped::kFound)
    if (found.kind == overlapped::Kind{overlapped::Gradients::kFp32, overlapped::Weights::kWhole})
      return overlapped::assembled(found.kind, found.order);
  return {};
}

// What a test changes of the code's constants.
struct Changed {
  float root = -1.0f;                              // a power of two
  uint64_t carried = ExactQuotientTest::kCarried;  // 0: all dividends pass
  float one = 1.0f;                                // others spoil all multiplications
};

// Factors with which an update leaves the moments alone and makes a weight of 0 their quotient.
Frame frame_of(const Changed& changed) {
  const auto four = [](float x) { return FourFloats{{x, x, x, x}}; };
  return {.beta1 = four(1.0f),
          .beta2 = four(1.0f),
          .root = four(changed.root),
          .decay = four(1.0f),
          .one = four(changed.one),
          .tested = ExactQuotientTest::kTested,
          .added = ExactQuotientTest::kAdded,
          .carried = changed.carried};
}

// Groups of moments, in which the second half repeats the first: multiplications divide that one,
// the unit the other. The last group is always divided by the unit; it is not used.
class Groups {
 public:
  explicit Groups(const Changed& changed, int count = 512)
      : frame_(frame_of(changed)), count_(count) {
    for (std::vector<float>* array : {&gradient_, &first_, &second_, &weight_, &lower_})
      array->assign(static_cast<size_t>((count + 1) * kGroup), 0.0f);
    frame_.gradient = gradient_.data();
    frame_.first = first_.data();
    frame_.second = second_.data();
    frame_.weight = weight_.data();
    frame_.lower = lower_.data();
    frame_.groups = count + 1;
  }

  void set(int i, float first, float second) {
    for (const int half : {0, kHalf}) {
      const auto at = static_cast<size_t>(i / kHalf * kGroup + half + i % kHalf);
      first_[at] = first;
      second_[at] = second;
    }
  }
  int capacity() const { return count_ * kHalf; }

  void update() {
    std::fill(weight_.begin(), weight_.end(), 0.0f);
    const DefaultNan usual;
    code_(frame_);
  }
  // Of the multiplied half; and of the other one.
  float quotient(int i, int half = 0) const {
    return weight_[static_cast<size_t>(i / kHalf * kGroup + half + i % kHalf)];
  }
  bool is_same_in_both_halves(int i) const {
    return std::bit_cast<uint32_t>(quotient(i)) == std::bit_cast<uint32_t>(quotient(i, kHalf));
  }

 private:
  const testing::RunnableCode code_{code_for_whole_weights()};
  Frame frame_;
  int count_;
  std::vector<float> gradient_, first_, second_, weight_, lower_;
};

// Compares many quotients by positive divisors, which the code has with the other sign. The root
// of a rounded square is the number itself.
class Comparison {
 public:
  explicit Comparison(const Changed& changed = {}) : root_(-changed.root), groups_(changed) {}

  void add(float dividend, float divisor) {
    const float root = divisor / root_;
    if (std::sqrt(root * root) != root) ++num_wrong_;
    groups_.set(static_cast<int>(expected_.size()), dividend, root * root);
    expected_.push_back(dividend / -divisor);
    if (static_cast<int>(expected_.size()) == groups_.capacity()) compare();
  }
  void finish() {
    while (!expected_.empty()) add(1.5f, 1.25f * root_);
  }
  int64_t num_compared() const { return num_compared_; }
  int64_t num_wrong() const { return num_wrong_; }

 private:
  void compare() {
    groups_.update();
    for (int i = 0; i < groups_.capacity(); ++i) {
      const bool is_divided = groups_.quotient(i, kHalf) == expected_[static_cast<size_t>(i)];
      if (!is_divided || !groups_.is_same_in_both_halves(i)) ++num_wrong_;
    }
    num_compared_ += groups_.capacity();
    expected_.clear();
  }

  const float root_;
  Groups groups_;
  std::vector<float> expected_;
  int64_t num_compared_ = 0;
  int64_t num_wrong_ = 0;
};

constexpr Changed kAllPass{.carried = 0};

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

// In a test of its own instructions, since the code does not show its reciprocals.
TEST(ExactQuotient, ReciprocalsOfAllMantissasAreWithinTwoToTheMinus24) {
  double worst = 0;
  for (uint32_t mantissa = kOne; mantissa < 2 * kOne; mantissa += 4) {
    const float divisors[4] = {of_mantissa(mantissa), of_mantissa(mantissa + 1),
                               of_mantissa(mantissa + 2), of_mantissa(mantissa + 3)};
    const float32x4_t d = vld1q_f32(divisors);
    float32x4_t y = vrecpeq_f32(d);
    y = vmulq_f32(y, vrecpsq_f32(d, y));
    y = vfmaq_f32(y, y, vfmsq_f32(vdupq_n_f32(1.0f), d, y));
    float reciprocals[4];
    vst1q_f32(reciprocals, y);
    for (int i = 0; i < 4; ++i)
      worst = std::max(worst, std::abs(static_cast<double>(reciprocals[i]) * divisors[i] - 1.0));
  }
  EXPECT_LE(worst, 0x1p-24);
}

TEST(ExactQuotient, RoundsTheHardestQuotientsOfAllDivisors) {
  Comparison comparison(kAllPass);
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
  Comparison comparison(kAllPass);
  for (uint32_t divisor = kOne; divisor < kAllBits; ++divisor)
    comparison.add(1.0f, of_mantissa(divisor));
  comparison.finish();
  EXPECT_EQ(comparison.num_wrong(), 0);
  for (int i = 0; i < 4; ++i) comparison.add(1.0f, of_mantissa(kAllBits));
  comparison.finish();
  EXPECT_EQ(comparison.num_wrong(), 4);
  Comparison in_use;
  for (int i = 0; i < 4; ++i) in_use.add(1.0f, of_mantissa(kAllBits));
  in_use.finish();
  EXPECT_EQ(in_use.num_wrong(), 0);
}

// --- the range -----------------------------------------------------------------------------------

TEST(ExactQuotient, RoundsAtTheEndsOfTheRange) {
  const float dividends[] = {
      std::nextafter(0x1p-63f, 1.0f), 0x1.5p-63f, 0x1.fffffep-63f, 0x1.000002p0f, 0x1.000002p64f,
      std::nextafter(0x1p65f, 1.0f)};
  const std::vector<float> small = {kMinExactDivisor, 0x1.fffffep-60f, 0x1.000002p-60f};
  const std::vector<float> large = {0x1.8p0f, 0x1.fffffep61f, 0x1.000002p61f, kMaxExactDivisor};
  for (const auto& [root, divisors] : {std::pair{-0x1p-40f, small}, std::pair{-0x1p40f, large}}) {
    Comparison comparison(Changed{.root = root, .carried = 0});
    for (const float m : dividends)
      for (const float d : divisors) {
        comparison.add(m, d);
        comparison.add(-m, d);
      }
    comparison.finish();
    EXPECT_EQ(comparison.num_wrong(), 0);
  }
}

TEST(ExactQuotient, RoundsRandomQuotientsOfAllExponents) {
  std::mt19937_64 random(7);
  for (const int shift : {-29, 0, 29}) {
    Comparison comparison(Changed{.root = -std::ldexp(1.0f, shift)});
    for (int i = 0; i < 5'000'000; ++i) {
      const uint64_t bits = random();
      const auto dividend = static_cast<uint32_t>(64 + (bits & 127)) << 23;  // 2^-63 to 2^64
      const auto divisor =
          static_cast<uint32_t>(127 + shift - 31 + static_cast<int>((bits >> 7) % 63))
          << 23;  // 2^-31 to 2^31, times the root's factor
      const auto low = static_cast<uint32_t>(bits >> 14) & 0x807FFFFFu;
      const auto high = static_cast<uint32_t>(bits >> 32) & 0x007FFFFFu;
      comparison.add(std::bit_cast<float>(dividend | low | 1u),
                     std::bit_cast<float>(divisor | high));
    }
    comparison.finish();
    EXPECT_EQ(comparison.num_wrong(), 0);
  }
}

// --- what is refused -----------------------------------------------------------------------------

// Whether a group of these moments is divided by multiplications: a constant of theirs is spoilt.
bool is_multiplied(const std::array<float, kHalf>& firsts,
                   const std::array<float, kHalf>& seconds) {
  Groups groups({.one = 5.0f}, /*count=*/1);
  for (int i = 0; i < kHalf; ++i)
    groups.set(i, firsts[static_cast<size_t>(i)], seconds[static_cast<size_t>(i)]);
  groups.update();
  int num_spoilt = 0;
  for (int i = 0; i < kHalf; ++i) num_spoilt += groups.is_same_in_both_halves(i) ? 0 : 1;
  return num_spoilt > 0;
}

constexpr std::array<float, kHalf> kFirsts = {0.1f,   -0.3f, 1e-18f,      7e18f,
                                              -3e-5f, 11.0f, -1.0000001f, 0.7f};
constexpr std::array<float, kHalf> kSeconds = {1e-9f, 1e-3f,          1e-18f, 7e18f,
                                               3e-5f, 0x1.fffffep64f, 1.0f,   0.7f};

TEST(ExactQuotient, RefusesDividendsOutOfRangeInAnyPlace) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float refused[] = {0.0f,      -0.0f, 0x1p-149f, 0x1.8p-130f, std::nextafter(0x1p-63f, 0.0f),
                           0x1.8p65f, 3e38f, kInf,      NAN,         0x1p-10f,
                           -1.0f,     -kInf, -NAN,      -0x1.8p-64f, std::bit_cast<float>(~0u)};
  EXPECT_TRUE(is_multiplied(kFirsts, kSeconds));
  for (const float value : refused)
    for (size_t place = 0; place < kFirsts.size(); ++place) {
      std::array<float, kHalf> firsts = kFirsts;
      firsts[place] = value;
      EXPECT_FALSE(is_multiplied(firsts, kSeconds)) << value << " at " << place;
    }
}

TEST(ExactQuotient, TakesDividendsAtTheEndsOfTheRange) {
  for (const float value : {std::nextafter(0x1p-63f, 1.0f), 0x1.fffffep64f, 0x1.000002p0f})
    for (size_t place = 0; place < kFirsts.size(); ++place) {
      std::array<float, kHalf> firsts = kFirsts;
      firsts[place] = -value;
      EXPECT_TRUE(is_multiplied(firsts, kSeconds)) << value << " at " << place;
    }
}

TEST(ExactQuotient, RefusesSecondMomentsAnyOfWhichIsTooLarge) {
  for (const float value : {0x1p65f, 3e38f, std::numeric_limits<float>::infinity(), NAN})
    for (size_t place = 0; place < kSeconds.size(); ++place) {
      std::array<float, kHalf> seconds = kSeconds;
      seconds[place] = value;
      EXPECT_FALSE(is_multiplied(kFirsts, seconds)) << value << " at " << place;
    }
}

}  // namespace
}  // namespace fsdp

#else

TEST(ExactQuotient, IsForAarch64) { GTEST_SKIP() << "Other machines divide by their own unit."; }

#endif
