// The steps of the overlapped AdamW (aarch64): what it does with the moments of a group of vectors
// and with the weights of the group before, and what its code and its caller share.
#pragma once

#include <cstdint>

namespace fsdp::overlapped {

// As many vectors as keep both stages' instructions in flight and their operands in registers.
inline constexpr int kVectors = 4;
inline constexpr int kMultiplied = 2;  // of them, the first ones, are divided by multiplications
inline constexpr int kGroup = 4 * kVectors;

// How gradients and weights lie in memory. Moments are fp32.
enum class Gradients : uint8_t { kFp32, kBf16 };
enum class Weights : uint8_t { kWhole, kSeparate, kSplit };  // alone, beside bf16 ones, in halves
struct Kind {
  Gradients gradients;
  Weights weights;

  friend constexpr bool operator==(const Kind&, const Kind&) = default;
};

constexpr int gradient_bytes(Kind kind) { return kind.gradients == Gradients::kBf16 ? 2 : 4; }
constexpr int weight_bytes(Kind kind) { return kind.weights == Weights::kSplit ? 2 : 4; }

// What is done with a vector, or with a pair of vectors where halves are loaded or stored.
enum Do : uint8_t {
  // The moments of the next group.
  kLoadGradient,
  kWidenGradient,
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
  kLoadWhole,
  kLoadUpper,
  kLoadLower,
  kWiden,
  kJoin,
  kDecay,
  kStoreWhole,
  kRound,
  kCut,
  kStoreUpper,
  kStoreLower,
  // Memory that groups to come will need.
  kAskGradient,
  kAskFirst,
  kAskSecond,
  kAskWeight,
  kAskLower,
};

constexpr bool is_of_moments(Do what) { return what <= kDenominator; }
constexpr bool is_of_weights(Do what) { return kDenominator < what && what <= kStoreLower; }

struct Step {
  Do what;
  int of;  // which vector, or pair

  friend constexpr bool operator==(const Step&, const Step&) = default;
};

struct alignas(16) FourFloats {
  float values[4] = {};
};

// What the code is called with, and leaves as it is. It has all of this in registers, but for `eps`
// and `one`, which instructions overwrite: they are loaded each time, since a copy of a register
// would take a vector unit's time.
struct Frame {
  FourFloats beta1{}, beta2{}, to_first{}, to_second{}, root{}, decay{};
  FourFloats eps{}, one{};
  // Where the first group lies.
  const void* gradient = nullptr;
  void* first = nullptr;
  void* second = nullptr;
  void* weight = nullptr;  // fp32, or its upper halves
  void* lower = nullptr;   // its lower halves; or bf16 weights beside it
  int64_t groups = 0;      // at least one
  // Constants of ExactQuotientTest.
  uint64_t tested = 0;
  uint64_t added = 0;
  uint64_t carried = 0;
};

}  // namespace fsdp::overlapped
