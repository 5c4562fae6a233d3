// Compiled without the compiler's own order of instructions (CMakeLists.txt): see
// Note [The order of operations].
#include "fsdp/optim/overlapped_adamw.h"

#if defined(__aarch64__)

#include <type_traits>
#include <utility>

#include "fsdp/base/inlined.h"
#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/narrow_vectors.h"
#include "fsdp/optim/overlapped_order.h"

namespace fsdp::overlapped {

namespace {

// Arrays, since compilers take a structure of four vectors for four neighbouring registers.
using Vector = float32x4_t;
using Group = Vector[kVectors];
using vectors::as_bits;
using vectors::as_floats;

// Loads and stores that stay where they are written: a compiler would move a load to its first use.
template <typename Register>
struct InMemory {
  typedef Register Type [[gnu::aligned(2), gnu::may_alias]];
};
template <typename Register>
FSDP_INLINED Register load(const void* from) {
  return *static_cast<const volatile typename InMemory<Register>::Type*>(from);
}
template <typename Register>
FSDP_INLINED void store(void* to, Register values) {
  *static_cast<volatile typename InMemory<Register>::Type*>(to) = values;
}

FSDP_INLINED Vector widened(uint16x8_t bf16, int k) {
  return as_floats(k % 2 == 0 ? vshll_n_u16(vget_low_u16(bf16), 16) : vshll_high_n_u16(bf16, 16));
}

// Goes on to the next group, and asks for memory so many elements ahead: the core's own prefetching
// does not see past the end of a page.
constexpr int64_t kAhead = 1024;
template <typename Word>
FSDP_INLINED void go_on(Word*& at) {
  __builtin_prefetch(at + kAhead, /*for writing:*/ std::is_const_v<Word> ? 0 : 1);
  at += kGroup;
}

// --- how gradients and weights lie in memory -----------------------------------------------------

// The gradient at a vector of a group.
FSDP_INLINED Vector gradient_at(const float* group, int k) { return load<Vector>(group + 4 * k); }
FSDP_INLINED Vector gradient_at(const uint16_t* group, int k) {
  return widened(load<uint16x8_t>(group + k / 2 * 8), k);
}

// What an update has of weights in registers: vectors, and pairs of them as they lie in memory.
struct WeightRegisters {
  Group whole;
  uint16x8_t upper[kVectors / 2], rounded[kVectors / 2];
  int16x8_t lower[kVectors / 2];
};

// rounded_away of every element, which needs no test here: DefaultNan gives every NaN its usual
// form.
FSDP_INLINED void round_away(WeightRegisters& of, int k) {
  uint16x8_t& rounded = of.rounded[k / 2];
  const uint32x4_t bits = as_bits(of.whole[k]);
  if (k % 2 == 0) {
    rounded = vcombine_u16(vrshrn_n_u32(bits, 16), vdup_n_u16(0));
  } else {
    rounded = vrshrn_high_n_u32(vget_low_u16(rounded), bits, 16);
  }
}

// Each does its part of the steps that concern the weights of a group, and goes on to the next.
struct WholeWeights {
  float* weight;

  FSDP_INLINED void advance() { go_on(weight); }

  template <Do kWhat>
  FSDP_INLINED void perform(int k, WeightRegisters& of) const {
    const int pair = 8 * k;
    if constexpr (kWhat == kLoadUpper) of.whole[2 * k] = load<Vector>(weight + pair);
    if constexpr (kWhat == kLoadUpper) of.whole[2 * k + 1] = load<Vector>(weight + pair + 4);
    if constexpr (kWhat == kStoreUpper) store(weight + pair, of.whole[2 * k]);
    if constexpr (kWhat == kStoreUpper) store(weight + pair + 4, of.whole[2 * k + 1]);
  }
};

struct SeparateWeights {
  uint16_t* weight;
  float* main;

  FSDP_INLINED void advance() {
    weight += kGroup;  // only written
    go_on(main);
  }

  template <Do kWhat>
  FSDP_INLINED void perform(int k, WeightRegisters& of) const {
    WholeWeights{main}.perform<kWhat>(k, of);
    if constexpr (kWhat == kRound) round_away(of, k);
    if constexpr (kWhat == kStoreUpper) store(weight + 8 * k, of.rounded[k]);
  }
};

// join_weight and split_weight.
struct SplitWeights {
  uint16_t* upper;
  int16_t* remainder;

  FSDP_INLINED void advance() {
    go_on(upper);
    go_on(remainder);
  }

  template <Do kWhat>
  FSDP_INLINED void perform(int k, WeightRegisters& of) const {
    const int pair = 8 * k;
    if constexpr (kWhat == kLoadUpper) of.upper[k] = load<uint16x8_t>(upper + pair);
    if constexpr (kWhat == kLoadLower) of.lower[k] = load<int16x8_t>(remainder + pair);
    if constexpr (kWhat == kWiden) of.whole[k] = widened(of.upper[k / 2], k);
    if constexpr (kWhat == kJoin) of.whole[k] = joined(of.whole[k], of.lower[k / 2], k);
    if constexpr (kWhat == kRound) round_away(of, k);
    if constexpr (kWhat == kCut) of.lower[k] = cut(of.whole[2 * k], of.whole[2 * k + 1]);
    if constexpr (kWhat == kStoreUpper) store(upper + pair, of.rounded[k]);
    if constexpr (kWhat == kStoreLower) store(remainder + pair, of.lower[k]);
  }

 private:
  FSDP_INLINED static Vector joined(Vector whole, int16x8_t lower, int k) {
    const int32x4_t bits = vreinterpretq_s32_f32(whole);
    return vreinterpretq_f32_s32(k % 2 == 0 ? vaddw_s16(bits, vget_low_s16(lower))
                                            : vaddw_high_s16(bits, lower));
  }
  FSDP_INLINED static int16x8_t cut(Vector first, Vector second) {
    return vuzp1q_s16(vreinterpretq_s16_f32(first), vreinterpretq_s16_f32(second));
  }
};

// --- one group -----------------------------------------------------------------------------------

// What an iteration has in registers; the steps fill and use it.
struct Registers {
  Group gradient, scaled, first, second, root;  // of the next group
  ExactQuotientTest test;
  ExactQuotient quotients[kVectors];  // of this one
  WeightRegisters weights;
};

template <typename GradientCode, typename Weights>
struct Loop {
  const Factors by;
  const LoadedConstants& loaded;
  const GradientCode* gradient;
  float* first;
  float* second;
  Weights weights;

  FSDP_INLINED void advance() {
    go_on(gradient);
    go_on(first);
    go_on(second);
    weights.advance();
  }

  // A step for the moments of a group.
  template <Do kWhat, int k, int64_t kBegin>
  FSDP_INLINED void update_moments(Vector& denominator, Registers& of) const {
    float* const first_at = first + kBegin + 4 * k;
    float* const second_at = second + kBegin + 4 * k;
    Vector& m = of.first[k];
    Vector& v = of.second[k];
    Vector& g = of.gradient[k];
    Vector& scaled = of.scaled[k];
    if constexpr (kWhat == kLoadGradient) g = gradient_at(gradient + kBegin, k);
    if constexpr (kWhat == kLoadFirst) m = load<Vector>(first_at);
    if constexpr (kWhat == kDecayFirst) m = vmulq_f32(m, by.beta1);
    if constexpr (kWhat == kUpdateFirst) m = vfmaq_f32(m, g, by.to_first);
    if constexpr (kWhat == kStoreFirst) store(first_at, m);
    if constexpr (kWhat == kTestFirst) of.test.take_dividends(first_at);
    if constexpr (kWhat == kScaleGradient) scaled = vmulq_f32(g, by.to_second);
    if constexpr (kWhat == kLoadSecond) v = load<Vector>(second_at);
    if constexpr (kWhat == kDecaySecond) v = vmulq_f32(v, by.beta2);
    if constexpr (kWhat == kUpdateSecond) v = vfmaq_f32(v, scaled, scaled);
    if constexpr (kWhat == kStoreSecond) store(second_at, v);
    if constexpr (kWhat == kTestSecond) of.test.take_second_moments(second_at);
    if constexpr (kWhat == kRoot) of.root[k] = vsqrtq_f32(v);
    if constexpr (kWhat == kLoadEps) denominator = loaded.eps;
    if constexpr (kWhat == kDenominator) denominator = vfmaq_f32(denominator, of.root[k], by.root);
  }

  // A step for the weights of this group, by exact_quotient.h or a division.
  template <Do kWhat, int k>
  FSDP_INLINED void update_weights(Vector d, Registers& of) const {
    ExactQuotient& quotient = of.quotients[k];
    if constexpr (kWhat == kLoadDividend) quotient.m = load<Vector>(first + 4 * k);
    if constexpr (kWhat == kEstimate) quotient.estimate(d);
    if constexpr (kWhat == kEstimateError) quotient.estimate_error(d);
    if constexpr (kWhat == kReciprocal) quotient.reciprocal();
    if constexpr (kWhat == kLoadOne) quotient.one = loaded.one;
    if constexpr (kWhat == kReciprocalError) quotient.reciprocal_error(d);
    if constexpr (kWhat == kCloseReciprocal) quotient.close_reciprocal();
    if constexpr (kWhat == kQuotient) quotient.quotient();
    if constexpr (kWhat == kRemainder) quotient.remainder(d);
    if constexpr (kWhat == kExactQuotient) quotient.exact_quotient();
    if constexpr (kWhat == kDivide) quotient.q = vdivq_f32(quotient.m, d);
    weights.template perform<kWhat>(k, of.weights);
    if constexpr (kWhat == kDecay)
      of.weights.whole[k] = vfmaq_f32(quotient.q, of.weights.whole[k], by.decay);
  }

  // The steps at these places of an order; the moments are those of the group at kBegin.
  template <const auto& kSteps, int64_t kBegin, size_t... kPlaces>
  FSDP_INLINED void perform(Group& denominators, Registers& of,
                            std::index_sequence<kPlaces...>) const {
    const auto one = [&]<Do kWhat, int k>() {
      if constexpr (is_of_moments(kWhat)) {
        update_moments<kWhat, k, kBegin>(denominators[k], of);
      } else {
        update_weights<kWhat, k>(denominators[k], of);
      }
    };
    (one.template operator()<kSteps[kPlaces].what, kSteps[kPlaces].of>(), ...);
  }
  template <const auto& kSteps, int64_t kBegin>
  FSDP_INLINED void perform(Group& denominators, Registers& of) const {
    perform<kSteps, kBegin>(denominators, of, std::make_index_sequence<std::size(kSteps)>());
  }

  // Updates all groups, and returns the number of elements.
  FSDP_INLINED int64_t run(int64_t numel) {
    if (numel < kGroup) return 0;
    Group denominators;
    Registers start;
    perform<kMomentsAlone, 0>(denominators, start);
    bool multiplies = start.test.passes();
    for (int64_t left = numel / kGroup; left > 1; --left) {
      Registers of;
      if (multiplies) [[likely]] {
        perform<kOrder, kGroup>(denominators, of);
      } else {
        perform<kDividedWeightsAlone, kGroup>(denominators, of);
        perform<kMomentsAlone, kGroup>(denominators, of);
      }
      multiplies = of.test.passes();
      advance();
    }
    Registers end;
    perform<kDividedWeightsAlone, 0>(denominators, end);
    return numel / kGroup * kGroup;
  }
};

// --- spans ---------------------------------------------------------------------------------------

// Of moments that pass the tests: their roots are below 2^33.
bool has_exact_divisors(const AdamWFactors& by) {
  const float largest = -(by.root * 0x1p33f + by.eps);
  return -by.eps >= kMinExactDivisor && -by.root >= 0.0f && largest <= kMaxExactDivisor;
}

// A function of its own for each kind of loop: compilers find better registers for it there.
template <typename GradientCode, typename Weights>
[[gnu::noinline]] int64_t run_loop(const AdamWFactors& by, const GradientCode* gradient,
                                   float* first, float* second, Weights weights, int64_t numel) {
  const LoadedConstants loaded{.eps = vdupq_n_f32(by.eps), .one = vdupq_n_f32(1.0f)};
  Loop<GradientCode, Weights> loop{Factors(by), loaded, gradient, first, second, weights};
  return loop.run(numel);
}

template <typename GradientCode>
int64_t update_with(const AdamWFactors& by, const UpdateSpan& span, int64_t begin, int64_t numel) {
  const auto* gradient = static_cast<const GradientCode*>(span.gradient) + begin;
  auto* first = static_cast<float*>(span.first.values) + begin;
  auto* second = static_cast<float*>(span.second.values) + begin;
  const auto run = [&](auto weights) {
    return run_loop(by, gradient, first, second, weights, numel);
  };
  if (span.main == MainWeight::kIsWeight)
    return run(WholeWeights{static_cast<float*>(span.weight) + begin});
  auto* weight = static_cast<uint16_t*>(span.weight) + begin;
  if (span.main == MainWeight::kSplit)
    return run(SplitWeights{weight, static_cast<int16_t*>(span.main_weight) + begin});
  return run(SeparateWeights{weight, static_cast<float*>(span.main_weight) + begin});
}

}  // namespace

int64_t update(const AdamWFactors& by, const UpdateSpan& span, int64_t begin, int64_t numel) {
  const bool has_wide_moments =
      span.first.dtype == DType::kFloat32 && span.second.dtype == DType::kFloat32;
  const DType weight = span.main == MainWeight::kIsWeight ? DType::kFloat32 : DType::kBFloat16;
  if (!has_wide_moments || span.weight_dtype != weight || !has_exact_divisors(by)) return 0;
  if (span.gradient_dtype == DType::kFloat32) return update_with<float>(by, span, begin, numel);
  if (span.gradient_dtype == DType::kBFloat16) return update_with<uint16_t>(by, span, begin, numel);
  return 0;
}

}  // namespace fsdp::overlapped

#endif  // __aarch64__
