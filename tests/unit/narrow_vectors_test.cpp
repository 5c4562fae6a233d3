// Sixteen numbers at a time against one at a time: every code, every number at which rounding
// changes its mind, random bits and roots.
#include "fsdp/optim/narrow_vectors.h"

#include <gtest/gtest.h>

#if defined(__aarch64__)

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fsdp/optim/default_nan.h"
#include "fsdp/optim/moment_code.h"
#include "fsdp/optim/narrow_moments.h"
#include "fsdp/optim/random_vectors.h"

namespace fsdp {
namespace {

using vectors::Codes;
using vectors::Halves;
using vectors::Sixteen;

constexpr size_t kGroup = 16;

// Both signs of all codes' numbers, of the middles between neighbours, what lies beside them, and
// numbers beyond the range; an even number of groups.
template <typename Narrow>
std::vector<float> hard_numbers(float largest) {
  constexpr uint32_t kCodes = 1u << (8 * sizeof(typename Narrow::Code) - 1);
  std::vector<float> numbers;
  const auto add = [&](float value) {
    for (const float beside :
         {value, std::nextafter(value, 0.0f), std::nextafter(value, HUGE_VALF), value * 0.99f})
      if (std::isfinite(beside) && beside <= largest)
        numbers.insert(numbers.end(), {beside, -beside});
  };
  for (uint32_t code = 0; code + 1 < kCodes; ++code) {
    const float low = Narrow::widened(static_cast<typename Narrow::Code>(code));
    const float high = Narrow::widened(static_cast<typename Narrow::Code>(code + 1));
    add(low);
    add(low / 2 + high / 2);
  }
  for (const float value : {1e-45f, 1e-40f, 1e-20f, 1e20f, 3.4028235e38f}) add(value);
  numbers.resize((numbers.size() + kGroup - 1) / kGroup * kGroup);
  return numbers;
}

constexpr float kLargest = std::numeric_limits<float>::max();

template <typename Narrow, typename Store, typename Expected>
void expect_codes(const std::vector<float>& numbers, const Store& store, const Expected& expected) {
  std::array<typename Narrow::Code, kGroup> codes;
  for (size_t i = 0; i < numbers.size(); i += kGroup) {
    store(codes.data(), vectors::load(numbers.data() + i), i);
    for (size_t k = 0; k < kGroup; ++k)
      ASSERT_EQ(codes[k], expected(numbers[i + k], i + k)) << numbers[i + k];
  }
}

template <typename Narrow>
void expect_nearest(std::vector<float> numbers) {
  expect_codes<Narrow>(
      numbers,
      [](auto* to, const Sixteen& values, size_t) { Codes<Narrow>::store_nearest(to, values); },
      [](float value, size_t) { return Narrow::nearest(value); });
}

// Inf, and the NaN that updates compute, in a group of their own.
std::vector<float> with_inf_and_nan(std::vector<float> numbers) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (size_t k = 0; k < kGroup; ++k)
    numbers.push_back(std::array{kInf, -kInf, std::bit_cast<float>(0x7FC00000u), 1.0f}[k % 4]);
  return numbers;
}

TEST(NarrowVectors, RoundToTheNearestLikeOneNumber) {
  const DefaultNan usual;
  expect_nearest<Bf16>(with_inf_and_nan(hard_numbers<Bf16>(kLargest)));
  expect_nearest<Fp16>(with_inf_and_nan(hard_numbers<Fp16>(kLargest)));
  expect_nearest<Fp8E4M3>(hard_numbers<Fp8E4M3>(Fp8E4M3::kMax));
  expect_nearest<Fp8E5M2>(hard_numbers<Fp8E5M2>(Fp8E5M2::kMax));
}

template <typename Narrow>
void expect_stochastic() {
  const std::vector<float> numbers = with_inf_and_nan(hard_numbers<Narrow>(kLargest));
  for (const uint32_t offset : {0u, 1u, 0x7FFFu, 0x8000u, 0xFFFFu}) {
    const auto random = [&](size_t i) {  // a few draws for every number, the extremes among them
      return static_cast<uint16_t>(i % 3 == 0 ? offset : offset + 0x9E37u * i);
    };
    expect_codes<Narrow>(
        numbers,
        [&](uint16_t* to, const Sixteen& values, size_t i) {
          std::array<uint16_t, kGroup> bits;
          for (size_t k = 0; k < kGroup; ++k) bits[k] = random(i + k);
          Codes<Narrow>::store_stochastic(to, values, vectors::load(bits.data()));
        },
        [&](float value, size_t i) { return Narrow::stochastic(value, random(i)); });
  }
}

TEST(NarrowVectors, RoundStochasticallyLikeOneNumber) {
  const DefaultNan usual;
  expect_stochastic<Bf16>();
  expect_stochastic<Fp16>();
}

// All codes are widened, and those of numbers lead back.
template <typename Narrow>
void expect_widened() {
  using Code = typename Narrow::Code;
  constexpr uint32_t kCodes = 1u << (8 * sizeof(Code));
  std::array<Code, kGroup> codes, back;
  std::array<float, kGroup> widened;
  for (uint32_t first = 0; first < kCodes; first += kGroup) {
    for (uint32_t k = 0; k < kGroup; ++k) codes[k] = static_cast<Code>(first + k);
    const Sixteen numbers = Codes<Narrow>::load(codes.data());
    vectors::store(widened.data(), numbers);
    if constexpr (requires { Codes<Narrow>::store_exact(back.data(), numbers); })
      Codes<Narrow>::store_exact(back.data(), numbers);
    else
      Codes<Narrow>::store_nearest(back.data(), numbers);
    for (size_t k = 0; k < kGroup; ++k) {
      const float expected = Narrow::widened(codes[k]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(widened[k])) << first + k;
        continue;
      }
      ASSERT_EQ(std::bit_cast<uint32_t>(widened[k]), std::bit_cast<uint32_t>(expected))
          << first + k;
      if (!std::isfinite(expected)) continue;
      ASSERT_EQ(back[k], codes[k]);
    }
  }
}

TEST(NarrowVectors, WidenEveryCodeAndLeadBackToIt) {
  expect_widened<Bf16>();
  expect_widened<Fp16>();
  expect_widened<Fp8E4M3>();
  expect_widened<Fp8E5M2>();
}

template <typename Narrow, narrow::Left kLeft>
void expect_roots() {
  const auto word = [](float value) { return std::bit_cast<uint32_t>(value); };
  constexpr bool kIsNormal = kLeft == narrow::Left::kNormal;
  for (const float value : hard_numbers<Narrow>(Narrow::kMax)) {
    const float root = std::abs(value);
    if (kIsNormal && root < Narrow::kMinNormal) continue;
    // Where the choice changes, and around it.
    const auto [below, above, code] = Narrow::neighbours(root);
    const double gap = double(above) * above - double(below) * below;
    const double part = (double(root) * root - double(below) * below) / gap;
    const auto middle = static_cast<int>(part * 65536);
    for (int random = middle - 1; random <= middle + 2; ++random) {
      if (random < 0 || random > 0xFFFF) continue;
      const auto bits = static_cast<uint32_t>(random);
      const float32x4_t rounded =
          narrow::rounded_root<Narrow, kLeft>(vdupq_n_f32(root), vdupq_n_u32(bits << 7));
      const float expected = Narrow::widened(root_code<Narrow>(root, bits));
      ASSERT_EQ(word(vgetq_lane_f32(rounded, 0)), word(expected)) << root << ", " << random;
    }
  }
}

TEST(NarrowVectors, RootsBecomeTheNeighbourThatRootCodeChooses) {
  expect_roots<Fp16, narrow::Left::kFinite>();
  expect_roots<Fp16, narrow::Left::kNormal>();
  expect_roots<Fp8E4M3, narrow::Left::kFinite>();
  expect_roots<Fp8E4M3, narrow::Left::kNormal>();
  expect_roots<Fp8E5M2, narrow::Left::kFinite>();
  expect_roots<Fp8E5M2, narrow::Left::kNormal>();
}

// Where pairs carry, the upper half of a position changes, and around them.
TEST(RandomVectors, DrawTheBitsOfEveryPosition) {
  RandomVectors vectors_of(7, 11, 13, RandomPurpose::kSecondMoment);
  std::array<uint16_t, kGroup> drawn;
  for (const int64_t around : {int64_t{0}, int64_t{1} << 17, int64_t{3} << 17, int64_t{1} << 22,
                               int64_t{1} << 31, int64_t{1} << 32, int64_t{5} << 32})
    for (int64_t position = std::max(int64_t{0}, around - 2 * kScaleBlock);
         position <= around + 2 * kScaleBlock; position += kScaleBlock) {
      vectors_of.move_to(position);
      const RandomKey key = random_key(7, 11, 13, RandomPurpose::kSecondMoment, position);
      for (int64_t i = 0; i < kScaleBlock; i += kGroup) {
        vectors::store(drawn.data(), vectors_of.from(position).at(i));
        for (size_t k = 0; k < kGroup; ++k) {
          const auto at = static_cast<uint32_t>(position + i) + static_cast<uint32_t>(k);
          ASSERT_EQ(drawn[k], random_bits(key, at)) << position << " + " << i << " + " << k;
        }
      }
    }
}

}  // namespace
}  // namespace fsdp

#else

TEST(NarrowVectors, AreForAarch64) { GTEST_SKIP() << "Other machines have the compiler's loops."; }

#endif
