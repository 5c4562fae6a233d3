// In which order the overlapped update (aarch64) does what it does, as data.
//
// Note [The order of operations]
// The core has one unit for roots and divisions, which takes them one after the other, and two for
// everything else. It looks at a hundred operations or so at a time and starts those whose operands
// are there; but while a root waits for its unit, operations behind it wait, too. So an update is
// as fast as roots and divisions are evenly spread among the others, and the orders that compilers
// choose, with all roots side by side, leave a sixth of its speed. Every order in which a value is
// computed before it is used gives the same bits (a test at compile time looks after that); this
// one was found by moving operations at random and keeping what was faster, a million times
// (bench/results/2026-11-16-optim.md).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace fsdp::overlapped {

// As many vectors as keep both stages' operations in flight and their operands in registers.
inline constexpr int kVectors = 4;
inline constexpr int kMultiplied = 2;  // of them, the first ones, are divided by multiplications
inline constexpr int64_t kGroup = 4 * kVectors;

// What is done with a vector, or with a pair of vectors.
enum Do : uint8_t {
  // The moments of the next group.
  kLoadGradient,
  kLoadFirst,
  kDecayFirst,
  kUpdateFirst,
  kStoreFirst,
  kTestFirst,
  kScaleGradient,
  kLoadSecond,
  kDecaySecond,
  kUpdateSecond,
  kStoreSecond,
  kTestSecond,
  kRoot,
  kLoadEps,
  kDenominator,
  // The weights of this one, by exact_quotient.h or a division.
  kLoadDividend,
  kEstimate,
  kEstimateError,
  kReciprocal,
  kLoadOne,
  kReciprocalError,
  kCloseReciprocal,
  kQuotient,
  kRemainder,
  kExactQuotient,
  kDivide,
  kLoadUpper,
  kLoadLower,
  kWiden,
  kJoin,
  kDecay,
  kRound,
  kCut,
  kStoreUpper,
  kStoreLower,
};

constexpr bool is_of_moments(Do what) { return what <= kDenominator; }
constexpr bool is_of_pair(Do what) {
  return what == kLoadUpper || what == kLoadLower || what == kCut || what >= kStoreUpper;
}

struct Step {
  Do what;
  int of;  // which vector, or pair
};

// See Note [The order of operations]. (To be read in lines, not in a column of 106.)
// clang-format off
inline constexpr Step kOrder[] = {
    {kLoadDividend, 2},    {kLoadGradient, 1},    {kLoadGradient, 0},    {kEstimate, 0},
    {kDivide, 2},          {kLoadFirst, 0},       {kLoadSecond, 1},      {kScaleGradient, 1},
    {kEstimate, 1},        {kLoadUpper, 1},       {kLoadFirst, 1},       {kLoadFirst, 2},
    {kScaleGradient, 0},   {kDecayFirst, 1},      {kLoadSecond, 2},      {kEstimateError, 0},
    {kDecaySecond, 1},     {kLoadOne, 0},         {kLoadSecond, 3},      {kLoadGradient, 3},
    {kUpdateFirst, 1},     {kWiden, 3},           {kLoadSecond, 0},      {kDecayFirst, 0},
    {kLoadDividend, 3},    {kEstimateError, 1},   {kReciprocal, 1},      {kDecayFirst, 2},
    {kLoadLower, 0},       {kReciprocal, 0},      {kLoadUpper, 0},       {kReciprocalError, 0},
    {kDecaySecond, 0},     {kLoadEps, 2},         {kWiden, 2},           {kLoadDividend, 0},
    {kStoreFirst, 1},      {kDivide, 3},          {kLoadLower, 1},       {kUpdateSecond, 0},
    {kUpdateFirst, 0},     {kLoadGradient, 2},    {kLoadOne, 1},         {kJoin, 2},
    {kTestFirst, 1},       {kJoin, 3},            {kUpdateSecond, 1},    {kLoadEps, 3},
    {kLoadFirst, 3},       {kStoreSecond, 0},     {kCloseReciprocal, 0}, {kRoot, 0},
    {kUpdateFirst, 2},     {kReciprocalError, 1}, {kScaleGradient, 2},   {kDecay, 2},
    {kDecaySecond, 2},     {kDecayFirst, 3},      {kLoadDividend, 1},    {kQuotient, 0},
    {kScaleGradient, 3},   {kUpdateSecond, 2},    {kRoot, 1},            {kDecaySecond, 3},
    {kUpdateSecond, 3},    {kDecay, 3},           {kRound, 2},           {kRoot, 2},
    {kRemainder, 0},       {kCloseReciprocal, 1}, {kStoreFirst, 0},      {kQuotient, 1},
    {kWiden, 1},           {kExactQuotient, 0},   {kStoreFirst, 2},      {kRound, 3},
    {kWiden, 0},           {kStoreSecond, 2},     {kLoadEps, 0},         {kJoin, 0},
    {kRoot, 3},            {kTestFirst, 0},       {kRemainder, 1},       {kStoreSecond, 1},
    {kExactQuotient, 1},   {kJoin, 1},            {kUpdateFirst, 3},     {kStoreUpper, 1},
    {kDecay, 0},           {kLoadEps, 1},         {kDecay, 1},           {kTestSecond, 0},
    {kDenominator, 0},     {kStoreSecond, 3},     {kRound, 0},           {kRound, 1},
    {kCut, 1},             {kCut, 0},             {kDenominator, 1},     {kDenominator, 2},
    {kStoreFirst, 3},      {kStoreLower, 1},      {kStoreUpper, 0},      {kDenominator, 3},
    {kTestSecond, 1},      {kStoreLower, 0},
};
// clang-format on

// --- orders for the rest -------------------------------------------------------------------------

// Steps one after the other, vector by vector.
template <size_t kCapacity>
struct Sequence {
  std::array<Step, kCapacity> steps{};
  size_t count = 0;

  constexpr void add(Do what, int of) { steps[count++] = {what, of}; }
};

template <const auto& kSequence>
constexpr auto cut_to_count() {
  std::array<Step, kSequence.count> steps{};
  std::copy_n(kSequence.steps.begin(), kSequence.count, steps.begin());
  return steps;
}

constexpr bool is_test(Do what) { return what == kTestFirst || what == kTestSecond; }

inline constexpr auto kMomentSequence = [] {
  Sequence<kVectors*(kDenominator + 1)> sequence;
  for (int k = 0; k < kVectors; ++k)
    for (int what = 0; what <= kDenominator; ++what)
      if (!is_test(Do(what)) || k < kMultiplied) sequence.add(Do(what), k);
  return sequence;
}();
inline constexpr auto kDividedSequence = [] {
  Sequence<kVectors*(kStoreLower + 1)> sequence;
  for (int pair = 0; pair < kVectors / 2; ++pair)
    for (const Do what : {kLoadUpper, kLoadLower, kLoadDividend, kDivide, kWiden, kJoin, kDecay,
                          kRound, kCut, kStoreUpper, kStoreLower})
      for (int k = 2 * pair; k < 2 * pair + 2; ++k)
        if (!is_of_pair(what) || k % 2 == 0) sequence.add(what, is_of_pair(what) ? pair : k);
  return sequence;
}();

inline constexpr auto kMomentsAlone = cut_to_count<kMomentSequence>();
inline constexpr auto kDividedWeightsAlone = cut_to_count<kDividedSequence>();

// --- whether an order is right -------------------------------------------------------------------

// What comes after what, for the same vector.
struct Needed {
  Do later;
  Do earlier;
};
inline constexpr Needed kNeeded[] = {{kDecayFirst, kLoadFirst},
                                     {kUpdateFirst, kDecayFirst},
                                     {kUpdateFirst, kLoadGradient},
                                     {kStoreFirst, kUpdateFirst},
                                     {kTestFirst, kStoreFirst},
                                     {kScaleGradient, kLoadGradient},
                                     {kDecaySecond, kLoadSecond},
                                     {kUpdateSecond, kDecaySecond},
                                     {kUpdateSecond, kScaleGradient},
                                     {kStoreSecond, kUpdateSecond},
                                     {kTestSecond, kStoreSecond},
                                     {kRoot, kUpdateSecond},
                                     {kDenominator, kRoot},
                                     {kDenominator, kLoadEps},
                                     {kLoadEps, kRemainder},
                                     {kLoadEps, kDivide},  // the last that use the one before
                                     {kEstimateError, kEstimate},
                                     {kReciprocal, kEstimateError},
                                     {kReciprocalError, kReciprocal},
                                     {kReciprocalError, kLoadOne},
                                     {kCloseReciprocal, kReciprocalError},
                                     {kQuotient, kCloseReciprocal},
                                     {kQuotient, kLoadDividend},
                                     {kRemainder, kQuotient},
                                     {kExactQuotient, kRemainder},
                                     {kDivide, kLoadDividend},
                                     {kWiden, kLoadUpper},
                                     {kJoin, kWiden},
                                     {kJoin, kLoadLower},
                                     {kDecay, kJoin},
                                     {kDecay, kExactQuotient},
                                     {kDecay, kDivide},
                                     {kRound, kDecay},
                                     {kCut, kDecay},
                                     {kStoreUpper, kRound},
                                     {kStoreLower, kCut}};

constexpr bool concerns(const Step& step, int vector) {
  return is_of_pair(step.what) ? step.of == vector / 2 : step.of == vector;
}

using Places = std::array<int, kStoreLower + 1>;  // of a vector's steps, counted from 1

template <typename Order>
constexpr Places places_of(const Order& order, int vector) {
  Places places{};
  for (int i = 0; i < static_cast<int>(std::size(order)); ++i)
    if (concerns(order[i], vector)) places[order[i].what] = i + 1;
  return places;
}

template <typename Order>
constexpr bool is_ordered(const Order& order) {
  for (int vector = 0; vector < kVectors; ++vector) {
    const Places places = places_of(order, vector);
    for (const Needed& needed : kNeeded)
      if (places[needed.later] != 0 && places[needed.later] < places[needed.earlier]) return false;
    // The second of a pair is rounded into the register of the first.
    if (vector % 2 != 0 && places[kRound] < places_of(order, vector - 1)[kRound]) return false;
  }
  return true;
}

// Every step of every vector, once.
template <typename Order>
constexpr bool is_complete(const Order& order) {
  size_t num_steps = 0;
  for (int vector = 0; vector < kVectors; ++vector) {
    const Places places = places_of(order, vector);
    for (int what = 0; what <= kStoreLower; ++what) {
      const bool multiplies = is_test(Do(what)) || (what >= kEstimate && what <= kExactQuotient);
      const bool is_multiplied = vector < kMultiplied;
      const bool is_done = what == kDivide ? !is_multiplied : !multiplies || is_multiplied;
      if (is_done != (places[what] != 0)) return false;
      num_steps += is_done && !(is_of_pair(Do(what)) && vector % 2 != 0) ? 1 : 0;
    }
  }
  return num_steps == std::size(order);
}

static_assert(is_complete(kOrder) && is_ordered(kOrder));
static_assert(is_ordered(kMomentsAlone) && is_ordered(kDividedWeightsAlone));

}  // namespace fsdp::overlapped
