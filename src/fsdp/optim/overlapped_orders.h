// In which order overlapped updates (aarch64) take their steps.
//
// Note [The order of operations]
// The core has one unit for roots and divisions, which takes them one after the other, and two for
// everything else. It looks at a hundred instructions or so at a time and starts those whose
// operands are there; but while a root waits for its unit, instructions behind it wait, too. So an
// update is as fast as roots and divisions are evenly spread among the others, and the orders that
// compilers choose, with all roots side by side, leave a sixth of its speed. Every order in which a
// value is computed before it is used gives the same bits (checked at compile time); these were
// found by bench/update_order.cpp, which moves steps at random and keeps what is faster.
#pragma once

#include <span>

#include "fsdp/optim/overlapped_steps.h"

namespace fsdp::overlapped {

// To be read in lines, not in columns of a hundred.
// clang-format off
inline constexpr Step kWholeFp32[] = {
    {kLoadSecond, 0}, {kLoadGradient, 0}, {kLoadGradient, 1}, {kEstimate, 1}, {kLoadSecond, 1},
    {kEstimateError, 1}, {kLoadSecond, 3}, {kDecaySecond, 0}, {kLoadGradient, 3},
    {kScaleGradient, 1}, {kScaleGradient, 0}, {kScaleGradient, 3}, {kDecaySecond, 3},
    {kLoadFirst, 0}, {kLoadDividend, 3}, {kLoadFirst, 2}, {kDivide, 3}, {kLoadFirst, 1},
    {kReciprocal, 1}, {kLoadOne, 1}, {kDecaySecond, 1}, {kLoadDividend, 1}, {kDecayFirst, 1},
    {kDecayFirst, 0}, {kUpdateFirst, 1}, {kUpdateFirst, 0}, {kLoadWhole, 2}, {kEstimate, 0},
    {kEstimateError, 0}, {kLoadDividend, 2}, {kUpdateSecond, 0}, {kLoadWhole, 3},
    {kUpdateSecond, 1}, {kRoot, 1}, {kDivide, 2}, {kLoadEps, 2}, {kDecay, 3}, {kAskWeight, 0},
    {kRoot, 0}, {kAskSecond, 0}, {kReciprocalError, 1}, {kLoadSecond, 2}, {kLoadGradient, 2},
    {kUpdateSecond, 3}, {kLoadFirst, 3}, {kRoot, 3}, {kStoreFirst, 1}, {kDecayFirst, 2},
    {kAskFirst, 0}, {kLoadOne, 0}, {kCloseReciprocal, 1}, {kStoreFirst, 0}, {kStoreSecond, 1},
    {kStoreSecond, 0}, {kLoadEps, 3}, {kLoadWhole, 1}, {kTestSecond, 0}, {kLoadWhole, 0},
    {kQuotient, 1}, {kDecay, 2}, {kReciprocal, 0}, {kScaleGradient, 2}, {kDecaySecond, 2},
    {kUpdateSecond, 2}, {kRemainder, 1}, {kLoadDividend, 0}, {kReciprocalError, 0}, {kLoadEps, 1},
    {kTestFirst, 0}, {kExactQuotient, 1}, {kCloseReciprocal, 0}, {kQuotient, 0}, {kRoot, 2},
    {kRemainder, 0}, {kTestSecond, 1}, {kExactQuotient, 0}, {kDecayFirst, 3}, {kLoadEps, 0},
    {kDenominator, 3}, {kUpdateFirst, 2}, {kAskGradient, 0}, {kStoreWhole, 2}, {kDecay, 0},
    {kStoreWhole, 3}, {kStoreSecond, 2}, {kTestFirst, 1}, {kDenominator, 0}, {kDenominator, 1},
    {kUpdateFirst, 3}, {kDecay, 1}, {kStoreFirst, 2}, {kStoreWhole, 0}, {kDenominator, 2},
    {kStoreFirst, 3}, {kStoreSecond, 3}, {kStoreWhole, 1},
};
inline constexpr Step kWholeBf16[] = {
    {kEstimate, 0}, {kLoadGradient, 0}, {kWidenGradient, 1}, {kAskFirst, 0}, {kEstimate, 1},
    {kEstimateError, 0}, {kLoadGradient, 1}, {kWidenGradient, 2}, {kWidenGradient, 0},
    {kWidenGradient, 3}, {kLoadOne, 1}, {kLoadDividend, 2}, {kEstimateError, 1}, {kLoadSecond, 3},
    {kAskGradient, 0}, {kLoadSecond, 0}, {kReciprocal, 0}, {kLoadFirst, 1}, {kLoadOne, 0},
    {kLoadSecond, 1}, {kReciprocalError, 0}, {kLoadDividend, 0}, {kDecaySecond, 3},
    {kLoadSecond, 2}, {kDecayFirst, 1}, {kLoadFirst, 0}, {kLoadFirst, 2}, {kScaleGradient, 1},
    {kLoadFirst, 3}, {kDecaySecond, 1}, {kDecaySecond, 0}, {kScaleGradient, 0}, {kReciprocal, 1},
    {kDecayFirst, 0}, {kReciprocalError, 1}, {kUpdateFirst, 1}, {kUpdateFirst, 0}, {kAskWeight, 0},
    {kDecayFirst, 2}, {kUpdateSecond, 1}, {kUpdateSecond, 0}, {kLoadWhole, 0}, {kLoadDividend, 1},
    {kCloseReciprocal, 1}, {kStoreFirst, 1}, {kScaleGradient, 2}, {kCloseReciprocal, 0},
    {kStoreFirst, 0}, {kLoadWhole, 1}, {kTestFirst, 0}, {kQuotient, 1}, {kAskSecond, 0},
    {kLoadWhole, 2}, {kRoot, 0}, {kQuotient, 0}, {kStoreSecond, 0}, {kScaleGradient, 3},
    {kUpdateFirst, 2}, {kUpdateSecond, 3}, {kDecaySecond, 2}, {kDecayFirst, 3}, {kRemainder, 1},
    {kTestFirst, 1}, {kRoot, 1}, {kDivide, 2}, {kExactQuotient, 1}, {kTestSecond, 0},
    {kRemainder, 0}, {kUpdateSecond, 2}, {kLoadEps, 0}, {kLoadWhole, 3}, {kStoreSecond, 2},
    {kLoadEps, 2}, {kRoot, 3}, {kLoadDividend, 3}, {kExactQuotient, 0}, {kUpdateFirst, 3},
    {kDecay, 0}, {kDecay, 1}, {kLoadEps, 1}, {kDenominator, 0}, {kDivide, 3}, {kStoreSecond, 1},
    {kDenominator, 1}, {kStoreFirst, 2}, {kRoot, 2}, {kStoreWhole, 0}, {kStoreFirst, 3},
    {kDecay, 2}, {kTestSecond, 1}, {kStoreWhole, 2}, {kDecay, 3}, {kLoadEps, 3}, {kDenominator, 2},
    {kStoreWhole, 3}, {kDenominator, 3}, {kStoreWhole, 1}, {kStoreSecond, 3},
};
inline constexpr Step kSeparateFp32[] = {
    {kLoadSecond, 0}, {kLoadGradient, 1}, {kLoadFirst, 0}, {kLoadFirst, 1}, {kEstimate, 1},
    {kLoadFirst, 3}, {kEstimate, 0}, {kScaleGradient, 1}, {kLoadGradient, 0}, {kLoadSecond, 3},
    {kLoadDividend, 3}, {kLoadFirst, 2}, {kEstimateError, 1}, {kLoadDividend, 2}, {kLoadSecond, 2},
    {kDivide, 3}, {kEstimateError, 0}, {kDecayFirst, 0}, {kLoadGradient, 2}, {kDivide, 2},
    {kDecaySecond, 0}, {kLoadWhole, 3}, {kLoadEps, 3}, {kAskSecond, 0}, {kUpdateFirst, 0},
    {kDecayFirst, 1}, {kDecayFirst, 2}, {kDecay, 3}, {kReciprocal, 1}, {kLoadSecond, 1},
    {kLoadOne, 1}, {kReciprocalError, 1}, {kLoadGradient, 3}, {kUpdateFirst, 1}, {kLoadDividend, 1},
    {kDecaySecond, 3}, {kLoadOne, 0}, {kScaleGradient, 0}, {kCloseReciprocal, 1}, {kReciprocal, 0},
    {kScaleGradient, 2}, {kUpdateSecond, 0}, {kDecaySecond, 1}, {kLoadWhole, 2}, {kDecayFirst, 3},
    {kDecaySecond, 2}, {kAskFirst, 0}, {kLoadDividend, 0}, {kReciprocalError, 0},
    {kScaleGradient, 3}, {kCloseReciprocal, 0}, {kStoreFirst, 0}, {kUpdateSecond, 1},
    {kStoreSecond, 0}, {kLoadWhole, 1}, {kAskWeight, 0}, {kRoot, 0}, {kQuotient, 0}, {kDecay, 2},
    {kQuotient, 1}, {kUpdateSecond, 3}, {kStoreFirst, 1}, {kRemainder, 0}, {kRemainder, 1},
    {kLoadEps, 2}, {kRoot, 1}, {kAskGradient, 0}, {kTestSecond, 0}, {kStoreSecond, 1},
    {kLoadWhole, 0}, {kExactQuotient, 0}, {kTestFirst, 0}, {kUpdateSecond, 2}, {kLoadEps, 1},
    {kRoot, 2}, {kRoot, 3}, {kExactQuotient, 1}, {kDecay, 0}, {kRound, 0}, {kDenominator, 3},
    {kUpdateFirst, 2}, {kRound, 2}, {kStoreSecond, 3}, {kStoreWhole, 0}, {kTestSecond, 1},
    {kLoadEps, 0}, {kUpdateFirst, 3}, {kRound, 3}, {kDecay, 1}, {kRound, 1}, {kStoreSecond, 2},
    {kDenominator, 0}, {kDenominator, 2}, {kStoreUpper, 0}, {kStoreUpper, 1}, {kStoreWhole, 2},
    {kDenominator, 1}, {kStoreFirst, 2}, {kStoreFirst, 3}, {kStoreWhole, 1}, {kStoreWhole, 3},
    {kTestFirst, 1},
};
inline constexpr Step kSeparateBf16[] = {
    {kEstimate, 0}, {kLoadGradient, 1}, {kLoadDividend, 2}, {kWidenGradient, 2}, {kLoadGradient, 0},
    {kLoadDividend, 0}, {kWidenGradient, 0}, {kLoadSecond, 1}, {kEstimate, 1}, {kLoadFirst, 2},
    {kLoadSecond, 3}, {kWidenGradient, 1}, {kEstimateError, 0}, {kLoadOne, 1}, {kEstimateError, 1},
    {kWidenGradient, 3}, {kAskWeight, 0}, {kScaleGradient, 1}, {kLoadDividend, 3}, {kLoadWhole, 3},
    {kLoadOne, 0}, {kLoadSecond, 2}, {kDivide, 3}, {kDecay, 3}, {kDivide, 2}, {kAskSecond, 0},
    {kLoadFirst, 1}, {kDecaySecond, 1}, {kReciprocal, 1}, {kUpdateSecond, 1}, {kScaleGradient, 0},
    {kReciprocal, 0}, {kScaleGradient, 2}, {kLoadSecond, 0}, {kDecaySecond, 3}, {kStoreSecond, 1},
    {kDecaySecond, 0}, {kLoadFirst, 3}, {kReciprocalError, 0}, {kLoadFirst, 0}, {kAskGradient, 0},
    {kDecayFirst, 0}, {kDecayFirst, 3}, {kCloseReciprocal, 0}, {kDecaySecond, 2}, {kDecayFirst, 2},
    {kDecayFirst, 1}, {kLoadWhole, 2}, {kAskFirst, 0}, {kUpdateFirst, 0}, {kUpdateSecond, 0},
    {kUpdateSecond, 2}, {kReciprocalError, 1}, {kUpdateFirst, 1}, {kScaleGradient, 3},
    {kUpdateFirst, 2}, {kQuotient, 0}, {kStoreSecond, 0}, {kLoadWhole, 1}, {kRoot, 0},
    {kLoadDividend, 1}, {kStoreFirst, 0}, {kCloseReciprocal, 1}, {kLoadWhole, 0}, {kRemainder, 0},
    {kTestFirst, 0}, {kLoadEps, 0}, {kDecay, 2}, {kQuotient, 1}, {kRemainder, 1}, {kStoreFirst, 1},
    {kUpdateFirst, 3}, {kDenominator, 0}, {kLoadEps, 1}, {kRoot, 1}, {kExactQuotient, 1},
    {kExactQuotient, 0}, {kRound, 2}, {kDecay, 1}, {kUpdateSecond, 3}, {kStoreSecond, 2},
    {kDecay, 0}, {kLoadEps, 2}, {kTestSecond, 0}, {kTestSecond, 1}, {kStoreFirst, 2}, {kRoot, 2},
    {kDenominator, 1}, {kStoreFirst, 3}, {kStoreSecond, 3}, {kStoreWhole, 2}, {kTestFirst, 1},
    {kRound, 3}, {kRound, 0}, {kDenominator, 2}, {kRound, 1}, {kStoreUpper, 1}, {kStoreWhole, 1},
    {kRoot, 3}, {kStoreWhole, 0}, {kStoreUpper, 0}, {kStoreWhole, 3}, {kLoadEps, 3},
    {kDenominator, 3},
};
inline constexpr Step kSplitFp32[] = {
    {kLoadGradient, 0}, {kLoadFirst, 1}, {kLoadFirst, 0}, {kLoadGradient, 1}, {kLoadSecond, 3},
    {kLoadSecond, 0}, {kLoadSecond, 1}, {kLoadUpper, 0}, {kAskLower, 0}, {kLoadDividend, 2},
    {kLoadDividend, 3}, {kEstimate, 0}, {kLoadOne, 1}, {kEstimate, 1}, {kLoadGradient, 3},
    {kEstimateError, 1}, {kDecaySecond, 0}, {kEstimateError, 0}, {kLoadFirst, 2},
    {kScaleGradient, 0}, {kReciprocal, 0}, {kDivide, 3}, {kDecayFirst, 0}, {kDecayFirst, 1},
    {kLoadOne, 0}, {kReciprocal, 1}, {kScaleGradient, 1}, {kDecaySecond, 3}, {kUpdateSecond, 0},
    {kLoadFirst, 3}, {kLoadDividend, 0}, {kReciprocalError, 1}, {kStoreSecond, 0}, {kDivide, 2},
    {kDecaySecond, 1}, {kAskGradient, 0}, {kLoadDividend, 1}, {kUpdateFirst, 1},
    {kCloseReciprocal, 1}, {kScaleGradient, 3}, {kLoadLower, 0}, {kStoreFirst, 1},
    {kUpdateFirst, 0}, {kQuotient, 1}, {kDecayFirst, 3}, {kRoot, 0}, {kLoadLower, 1},
    {kLoadUpper, 1}, {kUpdateFirst, 3}, {kUpdateSecond, 1}, {kAskFirst, 0}, {kDecayFirst, 2},
    {kWiden, 1}, {kRemainder, 1}, {kReciprocalError, 0}, {kLoadGradient, 2}, {kUpdateSecond, 3},
    {kLoadSecond, 2}, {kStoreFirst, 0}, {kCloseReciprocal, 0}, {kWiden, 2}, {kAskWeight, 0},
    {kWiden, 3}, {kQuotient, 0}, {kJoin, 3}, {kJoin, 2}, {kStoreSecond, 1}, {kTestSecond, 0},
    {kStoreFirst, 3}, {kDecaySecond, 2}, {kStoreSecond, 3}, {kScaleGradient, 2}, {kWiden, 0},
    {kRemainder, 0}, {kDecay, 3}, {kRoot, 1}, {kExactQuotient, 1}, {kJoin, 1}, {kRoot, 3},
    {kExactQuotient, 0}, {kDecay, 2}, {kTestSecond, 1}, {kTestFirst, 0}, {kRound, 2}, {kJoin, 0},
    {kLoadEps, 0}, {kLoadEps, 3}, {kUpdateFirst, 2}, {kDecay, 0}, {kUpdateSecond, 2},
    {kStoreSecond, 2}, {kRoot, 2}, {kLoadEps, 1}, {kRound, 0}, {kLoadEps, 2}, {kTestFirst, 1},
    {kDecay, 1}, {kCut, 0}, {kDenominator, 0}, {kCut, 1}, {kDenominator, 1}, {kRound, 1},
    {kStoreUpper, 0}, {kStoreFirst, 2}, {kRound, 3}, {kStoreUpper, 1}, {kStoreLower, 0},
    {kStoreLower, 1}, {kDenominator, 2}, {kDenominator, 3}, {kAskSecond, 0},
};
inline constexpr Step kSplitBf16[] = {
    {kEstimate, 1}, {kEstimate, 0}, {kLoadGradient, 1}, {kLoadGradient, 0}, {kLoadFirst, 1},
    {kLoadUpper, 1}, {kWidenGradient, 2}, {kWidenGradient, 3}, {kLoadDividend, 2}, {kLoadSecond, 3},
    {kWidenGradient, 1}, {kLoadDividend, 3}, {kEstimateError, 0}, {kScaleGradient, 2},
    {kEstimateError, 1}, {kWidenGradient, 0}, {kDivide, 3}, {kLoadFirst, 2}, {kLoadSecond, 0},
    {kDecayFirst, 1}, {kLoadFirst, 0}, {kDecayFirst, 0}, {kReciprocal, 1}, {kLoadOne, 0},
    {kDecaySecond, 0}, {kAskGradient, 0}, {kDivide, 2}, {kLoadUpper, 0}, {kLoadOne, 1},
    {kLoadEps, 3}, {kLoadLower, 0}, {kUpdateFirst, 0}, {kStoreFirst, 0}, {kLoadSecond, 2},
    {kReciprocal, 0}, {kDecaySecond, 3}, {kScaleGradient, 0}, {kUpdateSecond, 0}, {kDecaySecond, 2},
    {kAskLower, 0}, {kLoadSecond, 1}, {kStoreSecond, 0}, {kReciprocalError, 0}, {kDecayFirst, 2},
    {kWiden, 1}, {kUpdateSecond, 2}, {kDecaySecond, 1}, {kAskSecond, 0}, {kLoadDividend, 1},
    {kUpdateFirst, 1}, {kScaleGradient, 3}, {kScaleGradient, 1}, {kUpdateSecond, 3},
    {kTestFirst, 0}, {kUpdateFirst, 2}, {kReciprocalError, 1}, {kLoadDividend, 0}, {kStoreFirst, 1},
    {kUpdateSecond, 1}, {kRoot, 0}, {kCloseReciprocal, 0}, {kWiden, 2}, {kLoadFirst, 3},
    {kLoadLower, 1}, {kAskFirst, 0}, {kTestSecond, 0}, {kQuotient, 0}, {kStoreSecond, 3},
    {kWiden, 3}, {kJoin, 1}, {kAskWeight, 0}, {kStoreFirst, 2}, {kCloseReciprocal, 1}, {kRoot, 1},
    {kQuotient, 1}, {kRemainder, 1}, {kJoin, 2}, {kWiden, 0}, {kExactQuotient, 1}, {kDecay, 1},
    {kLoadEps, 1}, {kJoin, 0}, {kJoin, 3}, {kRemainder, 0}, {kLoadEps, 0}, {kStoreSecond, 1},
    {kTestSecond, 1}, {kDecayFirst, 3}, {kRoot, 3}, {kDecay, 3}, {kLoadEps, 2}, {kUpdateFirst, 3},
    {kExactQuotient, 0}, {kDecay, 0}, {kDecay, 2}, {kTestFirst, 1}, {kDenominator, 1}, {kRound, 0},
    {kCut, 1}, {kRound, 1}, {kRoot, 2}, {kRound, 2}, {kStoreFirst, 3}, {kDenominator, 2},
    {kDenominator, 3}, {kRound, 3}, {kDenominator, 0}, {kStoreSecond, 2}, {kCut, 0},
    {kStoreUpper, 1}, {kStoreLower, 1}, {kStoreLower, 0}, {kStoreUpper, 0},
};
// clang-format on

struct Found {
  Kind kind;
  std::span<const Step> order;
};
inline constexpr Found kFound[] = {
    {{Gradients::kFp32, Weights::kWhole}, kWholeFp32},
    {{Gradients::kBf16, Weights::kWhole}, kWholeBf16},
    {{Gradients::kFp32, Weights::kSeparate}, kSeparateFp32},
    {{Gradients::kBf16, Weights::kSeparate}, kSeparateBf16},
    {{Gradients::kFp32, Weights::kSplit}, kSplitFp32},
    {{Gradients::kBf16, Weights::kSplit}, kSplitBf16},
};

}  // namespace fsdp::overlapped
