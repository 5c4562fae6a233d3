// The instructions of the overlapped AdamW's steps, with variables in place of registers, and which
// of them must stay before which others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "fsdp/optim/aarch64_words.h"
#include "fsdp/optim/overlapped_steps.h"

namespace fsdp::overlapped {

// --- where things are ----------------------------------------------------------------------------

// General registers. The first is the code's argument; then what a frame has, in its order.
enum General : uint8_t {
  kFrame,
  kGradientAt,
  kFirstAt,
  kSecondAt,
  kWeightAt,
  kLowerAt,
  kGroupsLeft,
  kTestedBits,
  kAddedBits,
  kAllCarried,
  kFailed,
  kCarriedBits,
  kLargeBits,
  kScratch,  // and the next three
};

// Vector registers that hold the same all the time, in a frame's order; then the denominators,
// which go from one group to the next. Others are given to variables.
enum Constant : uint8_t { kBeta1, kBeta2, kToFirst, kToSecond, kRootFactor, kDecayFactor };
inline constexpr int kFirstDenominator = kDecayFactor + 1;
inline constexpr int kFirstFree = kFirstDenominator + kVectors;
inline constexpr int kZeroRegister = 31;
inline constexpr int kFirstKept = 8, kNumKept = 8;  // whose lower halves belong to the caller

// A variable of a vector or a pair. The last ones do not lie in vector registers.
enum Role : uint8_t {
  kGradient,
  kGradientPair,
  kScaled,
  kFirst,
  kSecond,
  kRootOf,
  kDenominatorOf,
  kDividend,
  kReciprocalOf,
  kError,
  kOneMinus,
  kQuotientOf,
  kWhole,
  kUpper,
  kLower,
  kRounded,
  kCutLower,
  kFirstInMemory,
  kSecondInMemory,
  kTests,
};
struct Variable {
  Role role = kGradient;
  int of = 0;

  friend constexpr bool operator==(const Variable&, const Variable&) = default;
};

// --- operations ----------------------------------------------------------------------------------

// How a step's instruction uses a variable: its register is filled in at a place of
// aarch64::kRegisterBits, 0 for results, unless it has none.
struct Use {
  Variable variable{};
  bool writes = false;
  int place = kNoPlace;

  static constexpr int kNoPlace = -1;
};

// One instruction; tests are a few, without vector registers.
struct Operation {
  Step step{};
  std::array<aarch64::Word, 7> words{};
  int num_words = 0;
  std::array<Use, 3> uses{};
  int num_uses = 0;

  constexpr void add(aarch64::Word word) { words[num_words++] = word; }
  constexpr void add(const Use& use) { uses[num_uses++] = use; }

  // Whether the one that comes first must stay first.
  constexpr bool conflicts(const Operation& other) const {
    for (int i = 0; i < num_uses; ++i)
      for (int j = 0; j < other.num_uses; ++j)
        if ((uses[i].writes || other.uses[j].writes) && uses[i].variable == other.uses[j].variable)
          return true;
    return false;
  }
};

// All steps of one kind of update, in an order that explains them: those that conflict must not
// change places, all others may.
class Operations {
 public:
  constexpr explicit Operations(Kind kind, int num_multiplied = kMultiplied)
      : kind_(kind), num_multiplied_(num_multiplied) {
    for (int k = 0; k < kVectors; ++k) {
      divide(k);
      update_weight(k);
    }
    for (int k = 0; k < kVectors; ++k) {
      load_gradient(k);
      update_moments(k);
      if (k < kMultiplied) test(k);
    }
    ask_for_memory();
  }

  static constexpr int kCapacity = 128;

  constexpr Kind kind() const { return kind_; }
  constexpr int size() const { return size_; }
  constexpr const Operation& operator[](int i) const { return operations_[i]; }

  // -1 if this kind of update has no such step.
  constexpr int find(Step step) const { return places_[step.what][step.of] - 1; }

 private:
  static constexpr int64_t kVectorBytes = 16;

  constexpr Operation& add(Step step) {
    Operation& added = operations_[size_++];
    added.step = step;
    places_[step.what][step.of] = size_;
    return added;
  }
  // d = f(a, b), or f(d, a, b).
  constexpr void compute(Step step, aarch64::Word word, Variable d,
                         std::initializer_list<Variable> operands) {
    Operation& added = add(step);
    added.add(word);
    added.add(Use{.variable = d, .writes = true, .place = 0});
    for (const Variable& operand : operands)
      added.add(Use{.variable = operand, .writes = false, .place = added.num_uses});
  }
  constexpr void compute(Step step, aarch64::Word word, Variable d, Variable a, int b) {
    compute(step, aarch64::with_registers(word, 0, 0, b), d, {a});
  }
  constexpr void load(Step step, Variable d, int base, int64_t bytes) {
    Operation& added = add(step);
    added.add(aarch64::load_vector(base, bytes));
    added.add(Use{.variable = d, .writes = true, .place = 0});
  }
  constexpr Operation& store(Step step, Variable d, int base, int64_t bytes) {
    Operation& added = add(step);
    added.add(aarch64::store_vector(base, bytes));
    added.add(Use{.variable = d, .writes = false, .place = 0});
    return added;
  }

  constexpr void load_gradient(int k);
  constexpr void update_moments(int k);
  constexpr void test(int k);
  constexpr void divide(int k);
  constexpr void update_weight(int k);
  constexpr void join(int k);
  constexpr void round(int k);
  constexpr void ask_for_memory();

  Kind kind_;
  int num_multiplied_;
  std::array<Operation, kCapacity> operations_{};
  int size_ = 0;
  std::array<std::array<int, kVectors>, kAskLower + 1> places_{};  // of steps, counted from 1
};

// --- the moments of the next group ---------------------------------------------------------------

constexpr void Operations::load_gradient(int k) {
  const int pair = k / 2;
  if (kind_.gradients == Gradients::kFp32) {
    load({kLoadGradient, k}, {kGradient, k}, kGradientAt, kVectorBytes * (kVectors + k));
    return;
  }
  if (k % 2 == 0)
    load({kLoadGradient, pair}, {kGradientPair, pair}, kGradientAt,
         kVectorBytes * (kVectors / 2 + pair));
  compute({kWidenGradient, k}, k % 2 == 0 ? aarch64::kWidenLow : aarch64::kWidenHigh,
          {kGradient, k}, {{kGradientPair, pair}});
}

constexpr void Operations::update_moments(int k) {
  const Variable gradient{kGradient, k}, scaled{kScaled, k}, first{kFirst, k}, second{kSecond, k};
  const Variable root{kRootOf, k}, denominator{kDenominatorOf, k};
  const int64_t at = kVectorBytes * (kVectors + k);
  load({kLoadFirst, k}, first, kFirstAt, at);
  compute({kDecayFirst, k}, aarch64::kMultiply, first, first, kBeta1);
  compute({kUpdateFirst, k}, aarch64::kAddProduct, first, gradient, kToFirst);
  store({kStoreFirst, k}, first, kFirstAt, at).add(Use{{kFirstInMemory, k}, true});
  compute({kScaleGradient, k}, aarch64::kMultiply, scaled, gradient, kToSecond);
  load({kLoadSecond, k}, second, kSecondAt, at);
  compute({kDecaySecond, k}, aarch64::kMultiply, second, second, kBeta2);
  compute({kUpdateSecond, k}, aarch64::kAddProduct, second, {scaled, scaled});
  store({kStoreSecond, k}, second, kSecondAt, at).add(Use{{kSecondInMemory, k}, true});
  compute({kRoot, k}, aarch64::kRoot, root, {second});
  load({kLoadEps, k}, denominator, kFrame, offsetof(Frame, eps));
  compute({kDenominator, k}, aarch64::kAddProduct, denominator, root, kRootFactor);
}

// ExactQuotientTest, in general registers and from memory: the vector units have no time for it.
constexpr void Operations::test(int k) {
  using aarch64::with_registers;
  const auto begin = [&](Do what, Role tested, General base, int low) -> Operation& {
    Operation& test = add({what, k});
    test.add(Use{{tested, k}, false});
    test.add(Use{{kTests, what == kTestFirst ? 0 : 1}, true});
    test.add(aarch64::load_pair(low, low + 1, base, kVectorBytes * (kVectors + k)));
    return test;
  };
  // The first vector's tests begin a group's bits, the others' add to them.
  const auto end = [&](Operation& test, General bits, aarch64::Word how, int low) {
    test.add(with_registers(how, bits, low, k == 0 ? low + 1 : bits));
    if (k != 0) test.add(with_registers(how, bits, bits, low + 1));
  };
  constexpr int kOfFirst = kScratch, kOfSecond = kScratch + 2;
  Operation& first = begin(kTestFirst, kFirstInMemory, kFirstAt, kOfFirst);
  for (const int half : {kOfFirst, kOfFirst + 1})
    first.add(with_registers(aarch64::kAnd, half, half, kTestedBits));
  for (const int half : {kOfFirst, kOfFirst + 1})
    first.add(with_registers(aarch64::kAdd, half, half, kAddedBits));
  end(first, kCarriedBits, aarch64::kAnd, kOfFirst);
  Operation& second = begin(kTestSecond, kSecondInMemory, kSecondAt, kOfSecond);
  for (const int half : {kOfSecond, kOfSecond + 1})
    second.add(with_registers(aarch64::kAndDoubled, half, half, half));
  end(second, kLargeBits, aarch64::kOr, kOfSecond);
}

// --- the weights of this group -------------------------------------------------------------------

constexpr void Operations::divide(int k) {
  const Variable d{kDenominatorOf, k}, m{kDividend, k}, y{kReciprocalOf, k}, e{kError, k};
  const Variable one{kOneMinus, k}, q{kQuotientOf, k};
  load({kLoadDividend, k}, m, kFirstAt, kVectorBytes * k);
  if (k >= num_multiplied_) {
    compute({kDivide, k}, aarch64::kDivide, q, {m, d});
    return;
  }
  compute({kEstimate, k}, aarch64::kEstimate, y, {d});
  compute({kEstimateError, k}, aarch64::kEstimateStep, e, {d, y});
  compute({kReciprocal, k}, aarch64::kMultiply, y, {y, e});
  load({kLoadOne, k}, one, kFrame, offsetof(Frame, one));
  compute({kReciprocalError, k}, aarch64::kTakeProduct, one, {d, y});
  compute({kCloseReciprocal, k}, aarch64::kAddProduct, y, {y, one});
  compute({kQuotient, k}, aarch64::kMultiply, q, {m, y});
  compute({kRemainder, k}, aarch64::kTakeProduct, m, {d, q});
  compute({kExactQuotient, k}, aarch64::kAddProduct, q, {m, y});
}

constexpr void Operations::update_weight(int k) {
  const Variable q{kQuotientOf, k}, whole{kWhole, k};
  const bool is_split = kind_.weights == Weights::kSplit;
  if (is_split) {
    join(k);
  } else {
    load({kLoadWhole, k}, whole, kWeightAt, kVectorBytes * k);
  }
  compute({kDecay, k}, aarch64::kAddProduct, q, whole, kDecayFactor);
  if (!is_split) store({kStoreWhole, k}, q, kWeightAt, kVectorBytes * k);
  if (kind_.weights != Weights::kWhole) round(k);
}

// join_weight.
constexpr void Operations::join(int k) {
  const int pair = k / 2;
  const bool is_low = k % 2 == 0;
  const Variable whole{kWhole, k}, upper{kUpper, pair}, lower{kLower, pair};
  if (is_low) load({kLoadUpper, pair}, upper, kWeightAt, kVectorBytes * pair);
  if (is_low) load({kLoadLower, pair}, lower, kLowerAt, kVectorBytes * pair);
  compute({kWiden, k}, is_low ? aarch64::kWidenLow : aarch64::kWidenHigh, whole, {upper});
  compute({kJoin, k}, is_low ? aarch64::kAddWideLow : aarch64::kAddWideHigh, whole, {whole, lower});
}

// rounded_away, and the rest of split_weight. NaN needs no test here: DefaultNan gives it its usual
// form.
constexpr void Operations::round(int k) {
  const int pair = k / 2;
  const bool is_low = k % 2 == 0;
  const bool is_split = kind_.weights == Weights::kSplit;
  const Variable q{kQuotientOf, k}, rounded{kRounded, pair}, cut{kCutLower, pair};
  compute({kRound, k}, is_low ? aarch64::kRoundLow : aarch64::kRoundHigh, rounded, q,
          kZeroRegister);
  if (is_low) return;
  store({kStoreUpper, pair}, rounded, is_split ? kWeightAt : kLowerAt, kVectorBytes * pair);
  if (!is_split) return;
  compute({kCut, pair}, aarch64::kEvenHalves, cut, {{kQuotientOf, k - 1}, q});
  store({kStoreLower, pair}, cut, kLowerAt, kVectorBytes * pair);
}

// --- memory --------------------------------------------------------------------------------------

// A page of fp32 numbers ahead: the core's own prefetching does not see past the end of one.
constexpr void Operations::ask_for_memory() {
  constexpr int kAhead = 1024;
  add({kAskGradient, 0}).add(aarch64::ask_to_read(kGradientAt, kAhead * gradient_bytes(kind_)));
  add({kAskFirst, 0}).add(aarch64::ask_to_write(kFirstAt, kAhead * 4));
  add({kAskSecond, 0}).add(aarch64::ask_to_write(kSecondAt, kAhead * 4));
  add({kAskWeight, 0}).add(aarch64::ask_to_write(kWeightAt, kAhead * weight_bytes(kind_)));
  // bf16 weights beside fp32 ones are only written.
  if (kind_.weights == Weights::kSplit)
    add({kAskLower, 0}).add(aarch64::ask_to_write(kLowerAt, kAhead * 2));
}

}  // namespace fsdp::overlapped
