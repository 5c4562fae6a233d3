// Orders of the overlapped update's steps: what is no order is refused, one that needs too many
// registers gives no code, and all others give code that computes the same bits.
#include "fsdp/optim/overlapped_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "fsdp/optim/default_nan.h"
#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/overlapped_orders.h"
#include "support/runnable_code.h"

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
  EXPECT_EQ(assembled(kSplitKind, loads_first).count, 0);
}

#if defined(__aarch64__)

// --- code ----------------------------------------------------------------------------------------

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
  const Code code = assembled(operations.kind(), steps);
  return code.count > 0 ? code : shuffled(operations, random);  // registers may not suffice
}

constexpr int kGroups = 40;
constexpr size_t kNumel = kGroups * kGroup;

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

// Which quotients may come from multiplications.
enum class Tested : uint8_t { kAsInUse, kNonePasses };

Frame frame_of(Arrays& arrays, int groups, Tested tested) {
  const auto four = [](float x) { return FourFloats{{x, x, x, x}}; };
  return {.beta1 = four(0.9f),
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
          .groups = groups,
          .tested = ExactQuotientTest::kTested,
          .added = ExactQuotientTest::kAdded,
          .carried = tested == Tested::kAsInUse ? ExactQuotientTest::kCarried : ~0ull};
}

void run(const Code& code, Arrays& arrays, int groups, Tested tested = Tested::kAsInUse) {
  const Frame frame = frame_of(arrays, groups, tested);
  const DefaultNan usual;
  testing::RunnableCode{code}(frame);
}

void expect_same(const Arrays& ours, const Arrays& theirs) {
  for (size_t i = 0; i < ours.values.size(); ++i)
    EXPECT_EQ(std::memcmp(ours.values[i].data(), theirs.values[i].data(), 4 * kNumel), 0) << i;
}

Code found_code(const Found& found) { return assembled(found.kind, found.order); }

TEST(OverlappedCode, ComputesTheSameBitsInEveryOrder) {
  std::mt19937 random(1);
  for (const Found& found : kFound)
    for (uint32_t seed = 0; seed < 50; ++seed) {
      Arrays ours(found.kind, seed);
      Arrays theirs = ours;
      run(found_code(found), ours, kGroups);
      run(shuffled(Operations(found.kind), random), theirs, kGroups);
      expect_same(ours, theirs);
    }
}

// Among moments whose quotients may come from multiplications, some whose must not.
TEST(OverlappedCode, ComputesTheSameBitsInBothOfItsLoops) {
  std::mt19937 random(2);
  for (const Found& found : kFound)
    for (int groups = 1; groups <= kGroups; ++groups) {
      Arrays ours(found.kind, 6);
      for (int i = 0; i < 2 * groups / 3; ++i)
        ours.values[random() % 2 + 1][random() % kNumel] = random() % 2 == 0 ? 0x1p66f : 3e38f;
      Arrays theirs = ours;
      run(found_code(found), ours, groups);
      run(found_code(found), theirs, groups, Tested::kNonePasses);
      expect_same(ours, theirs);
    }
}

// As every function must: compilers keep numbers there across calls.
TEST(OverlappedCode, LeavesTheRegistersOfItsCallerAsTheyWere) {
  for (const Found& found : kFound) {
    Arrays arrays(found.kind, 7);
    const testing::RunnableCode code(found_code(found));
    const Frame frame = frame_of(arrays, kGroups, Tested::kAsInUse);
    const double before[8] = {1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5};
    double after[8] = {};
    register const Frame* argument asm("x0") = &frame;
    register const double* from asm("x19") = before;
    register double* to asm("x20") = after;
    register const void* function asm("x21") = code.address();
    asm volatile(
        "ldp d8, d9, [x19]\n ldp d10, d11, [x19, #16]\n"
        "ldp d12, d13, [x19, #32]\n ldp d14, d15, [x19, #48]\n"
        "mov x22, sp\n blr x21\n mov x23, sp\n sub x22, x22, x23\n"
        "stp d8, d9, [x20]\n stp d10, d11, [x20, #16]\n"
        "stp d12, d13, [x20, #32]\n stp d14, d15, [x20, #48]\n"
        "add x20, x20, x22\n"
        : "+r"(argument), "+r"(from), "+r"(to), "+r"(function)
        :
        : "memory", "cc", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12",
          "x13", "x14", "x15", "x16", "x17", "x22", "x23", "x30", "v0", "v1", "v2", "v3", "v4",
          "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17",
          "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
          "v31");
    const double* const moved = to;  // by as much as the stack
    EXPECT_EQ(moved, after);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(after[i], before[i]) << "d" << 8 + i;
  }
}

#endif

}  // namespace
}  // namespace fsdp::overlapped
