// Orders of the overlapped update's steps: what is no order is refused, one that needs too many
// registers gives no code, and all others give code that computes the same bits.
#include "fsdp/optim/overlapped_code.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/overlapped_orders.h"

namespace fsdp::overlapped {
namespace {

constexpr Kind kSplitKind{Gradients::kFp32, Weights::kSplit};
constexpr Operations kSplitOperations(kSplitKind);

// The order that explains the steps.
constexpr auto kExplained = [] {
  std::array<Step, kSplitOperations.size()> steps{};
  for (int i = 0; i < kSplitOperations.size(); ++i) steps[i] = kSplitOperations[i].step;
  return steps;
}();

// --- what is an order ----------------------------------------------------------------------------

TEST(OverlappedOrder, HasEveryStepOnce) {
  EXPECT_TRUE(is_order(kSplitOperations, kExplained));
  auto doubled = kExplained;
  doubled[0] = doubled[1];
  EXPECT_FALSE(is_order(kSplitOperations, doubled));
  EXPECT_FALSE(is_order(kSplitOperations, std::span(kExplained).first(kExplained.size() - 1)));
  auto foreign = kExplained;
  std::replace(foreign.begin(), foreign.end(), Step{kLoadUpper, 0}, Step{kLoadWhole, 0});
  EXPECT_FALSE(is_order(kSplitOperations, foreign));
}

TEST(OverlappedOrder, KeepsEveryStepAfterWhatItNeedsAndBeforeWhatOverwritesIt) {
  const std::pair<Step, Step> kept[] = {
      {{kLoadFirst, 1}, {kDecayFirst, 1}},
      {{kStoreFirst, 0}, {kTestFirst, 0}},   // which reads memory
      {{kTestSecond, 0}, {kTestSecond, 1}},  // which adds to what the first one found
      {{kEstimateError, 0}, {kReciprocal, 0}},
      {{kDivide, 2}, {kLoadEps, 2}},  // the next group's denominator
      {{kRemainder, 1}, {kLoadEps, 1}},
      {{kUpdateSecond, 3}, {kStoreSecond, 3}},
      {{kRound, 0}, {kRound, 1}},  // into the same register
      {{kDecay, 2}, {kCut, 1}},
      {{kCut, 1}, {kStoreLower, 1}}};
  for (const auto& [earlier, later] : kept) {
    auto steps = kExplained;
    std::iter_swap(std::find(steps.begin(), steps.end(), earlier),
                   std::find(steps.begin(), steps.end(), later));
    EXPECT_FALSE(is_order(kSplitOperations, steps)) << int{earlier.what} << " " << int{later.what};
  }
}

TEST(OverlappedOrder, GivesNoCodeWhereRegistersDoNotSuffice) {
  auto loads_first = kExplained;
  std::stable_partition(loads_first.begin(), loads_first.end(), [](const Step& step) {
    return step.what == kLoadGradient || step.what == kLoadFirst || step.what == kLoadSecond ||
           step.what == kLoadDividend || step.what == kLoadUpper || step.what == kLoadLower ||
           step.what == kLoadOne;
  });
  ASSERT_TRUE(is_order(kSplitOperations, loads_first));
  EXPECT_EQ(assembled(kSplitOperations, loads_first).count, 0);
}

#if defined(__aarch64__)

// --- code ----------------------------------------------------------------------------------------

// Memory that code can be run in.
class Runnable {
 public:
  Runnable() {
    if (memory_ == MAP_FAILED) throw Error("no memory to run code in");
  }
  ~Runnable() { munmap(memory_, sizeof(Code)); }
  Runnable(const Runnable&) = delete;
  Runnable& operator=(const Runnable&) = delete;

  void operator()(const Code& code, Frame& frame) const {
    std::memcpy(memory_, code.words.data(), sizeof(code.words));
    auto* const begin = static_cast<char*>(memory_);
    __builtin___clear_cache(begin, begin + sizeof(code.words));
    reinterpret_cast<void (*)(Frame*)>(memory_)(&frame);
  }

 private:
  void* memory_ = mmap(nullptr, sizeof(Code), PROT_READ | PROT_WRITE | PROT_EXEC,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
};

// Neighbours change places, again and again, where they may.
Code shuffled(const Operations& operations, std::mt19937& random) {
  std::vector<int> places(static_cast<size_t>(operations.size()));
  std::iota(places.begin(), places.end(), 0);
  for (int move = 0; move < 3000; ++move) {
    int* const pair = &places[random() % (places.size() - 1)];
    if (!operations[pair[0]].conflicts(operations[pair[1]])) std::swap(pair[0], pair[1]);
  }
  std::vector<Step> steps;
  for (const int place : places) steps.push_back(operations[place].step);
  EXPECT_TRUE(is_order(operations, steps));
  const Code code = assembled(operations, steps);
  return code.count > 0 ? code : shuffled(operations, random);  // registers may not suffice
}

constexpr int kGroups = 40;
constexpr size_t kNumel = (kGroups + 1) * kGroup;

// Gradients, moments and weights as a kind of update has them. Any bits are weights.
struct Arrays {
  std::array<std::vector<float>, 5> values;

  Arrays(Kind kind, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::vector<float>& array : values) {
      array.resize(kNumel);
      for (float& value : array) value = normal(random);
    }
    for (float& second : values[2]) second = second * second;
    if (kind.gradients == Gradients::kBf16) halve(values[0]);
  }

 private:
  static void halve(std::vector<float>& gradients) {
    std::vector<uint16_t> halves;
    for (const float gradient : gradients)
      halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(gradient) >> 16));
    std::memcpy(gradients.data(), halves.data(), 2 * halves.size());
  }
};

Frame run(const Code& code, Arrays& arrays) {
  const Runnable runnable;
  const auto four = [](float x) { return FourFloats{{x, x, x, x}}; };
  Frame frame{.beta1 = four(0.9f),
              .beta2 = four(0.99f),
              .to_first = four(0.1f),
              .to_second = four(0.1f),
              .root = four(-300.0f),
              .decay = four(0.999f),
              .eps = four(-1e-4f),
              .one = four(1.0f),
              .gradient = arrays.values[0].data(),
              .first = arrays.values[1].data(),
              .second = arrays.values[2].data(),
              .weight = arrays.values[3].data(),
              .lower = arrays.values[4].data(),
              .groups = kGroups,
              .tested = ExactQuotientTest::kTested,
              .added = ExactQuotientTest::kAdded,
              .carried = ExactQuotientTest::kCarried};
  for (int k = 0; k < kVectors; ++k) frame.denominators[k] = four(-1.7f - static_cast<float>(k));
  runnable(code, frame);
  return frame;
}

void expect_same(const Code& one, const Code& other, const Arrays& before) {
  Arrays by_one = before;
  Arrays by_other = before;
  const Frame first = run(one, by_one);
  const Frame second = run(other, by_other);
  EXPECT_EQ(first.groups, second.groups);
  EXPECT_EQ(first.failed, second.failed);
  EXPECT_EQ(std::memcmp(first.denominators, second.denominators, sizeof(first.denominators)), 0);
  for (size_t i = 0; i < by_one.values.size(); ++i)
    EXPECT_EQ(std::memcmp(by_one.values[i].data(), by_other.values[i].data(), 4 * kNumel), 0) << i;
}

Code found_code(const Found& found) { return assembled(Operations(found.kind), found.order); }

TEST(OverlappedCode, ComputesTheSameBitsInEveryOrder) {
  std::mt19937 random(1);
  for (const Found& found : kFound) {
    const Operations operations(found.kind);
    for (uint32_t seed = 0; seed < 50; ++seed) {
      Arrays arrays(found.kind, seed);
      expect_same(found_code(found), shuffled(operations, random), arrays);
      EXPECT_EQ(run(found_code(found), arrays).groups, 0);
    }
  }
}

TEST(OverlappedCode, EndsAfterAGroupWhoseSuccessorIsNotDividedByMultiplications) {
  std::mt19937 random(2);
  for (const Found& found : kFound) {
    Arrays arrays(found.kind, 6);
    arrays.values[2][20 * kGroup + 3] = 0x1p66f;
    Arrays updated = arrays;
    const Frame frame = run(found_code(found), updated);
    EXPECT_EQ(frame.groups, kGroups - 20);
    EXPECT_NE(frame.failed, 0u);
    EXPECT_EQ(frame.first, updated.values[1].data() + 20 * kGroup);
    expect_same(found_code(found), shuffled(Operations(found.kind), random), arrays);
  }
}

#endif

}  // namespace
}  // namespace fsdp::overlapped
