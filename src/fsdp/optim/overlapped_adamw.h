// AdamW with fp32 moments where roots and divisions are what an update waits for (aarch64): half of
// the quotients come from multiplications instead, and the moments of one group of vectors are
// updated beside the weights of the group before. The same bits as adamw_element.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>

#include "fsdp/optim/adamw_math.h"
#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/update_block.h"
#include "fsdp/optim/update_span.h"

namespace fsdp::overlapped {

// As many as keep both stages' operations in flight and their operands in registers.
inline constexpr int kVectors = 4;
inline constexpr int kMultiplied = 2;  // of them, the first ones, are divided by multiplications
inline constexpr int64_t kGroup = 4 * kVectors;

// Arrays, since compilers take a structure of four vectors for four neighbouring registers.
using Vector = float32x4_t;
using Group = Vector[kVectors];

struct Factors {
  explicit Factors(const AdamWFactors& by)
      : beta1(vdupq_n_f32(by.beta1)),
        beta2(vdupq_n_f32(by.beta2)),
        to_first(vdupq_n_f32(by.to_first)),
        to_second(vdupq_n_f32(by.to_second)),
        root(vdupq_n_f32(by.root)),
        decay(vdupq_n_f32(by.decay)) {}

  Vector beta1, beta2, to_first, to_second, root, decay;
};

// Constants that operations overwrite. They are loaded each time: a copy of a register would take a
// vector unit's time.
struct LoadedConstants {
  volatile Vector eps;
  volatile Vector one;
};

// --- how gradients and weights lie in memory -----------------------------------------------------

FSDP_INLINED Vector as_floats(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }
FSDP_INLINED uint32x4_t as_bits(Vector values) { return vreinterpretq_u32_f32(values); }

FSDP_INLINED void load(const float* from, Group& group) {
  for (int k = 0; k < kVectors; ++k) group[k] = vld1q_f32(from + 4 * k);
}

FSDP_INLINED void load(const uint16_t* bf16, Group& group) {
  for (int k = 0; k < kVectors; k += 2) {
    const uint16x8_t codes = vld1q_u16(bf16 + 4 * k);
    group[k] = as_floats(vshll_n_u16(vget_low_u16(codes), 16));
    group[k + 1] = as_floats(vshll_high_n_u16(codes, 16));
  }
}

// rounded_away of every element, which needs no test here: DefaultNan gives every NaN its usual
// form.
FSDP_INLINED void store_rounded(uint16_t* bf16, const Group& group) {
  for (int k = 0; k < kVectors; k += 2) {
    const uint16x4_t low = vrshrn_n_u32(as_bits(group[k]), 16);
    vst1q_u16(bf16 + 4 * k, vrshrn_high_n_u32(low, as_bits(group[k + 1]), 16));
  }
}

struct WholeWeights {
  float* weight;

  FSDP_INLINED void load(int64_t i, Group& group) const { overlapped::load(weight + i, group); }
  FSDP_INLINED void store(int64_t i, const Group& group) const {
    for (int k = 0; k < kVectors; ++k) vst1q_f32(weight + i + 4 * k, group[k]);
  }
};

struct SeparateWeights {
  uint16_t* weight;
  float* main;

  FSDP_INLINED void load(int64_t i, Group& group) const { overlapped::load(main + i, group); }
  FSDP_INLINED void store(int64_t i, const Group& group) const {
    WholeWeights{main}.store(i, group);
    store_rounded(weight + i, group);
  }
};

// join_weight and split_weight.
struct SplitWeights {
  uint16_t* upper;
  int16_t* remainder;

  FSDP_INLINED void load(int64_t i, Group& group) const {
    overlapped::load(upper + i, group);
    for (int k = 0; k < kVectors; k += 2) {
      const int16x8_t lower = vld1q_s16(remainder + i + 4 * k);
      const int32x4_t first = vreinterpretq_s32_f32(group[k]);
      const int32x4_t second = vreinterpretq_s32_f32(group[k + 1]);
      group[k] = vreinterpretq_f32_s32(vaddw_s16(first, vget_low_s16(lower)));
      group[k + 1] = vreinterpretq_f32_s32(vaddw_high_s16(second, lower));
    }
  }
  FSDP_INLINED void store(int64_t i, const Group& group) const {
    store_rounded(upper + i, group);
    for (int k = 0; k < kVectors; k += 2) {
      const int16x8_t first = vreinterpretq_s16_f32(group[k]);
      const int16x8_t second = vreinterpretq_s16_f32(group[k + 1]);
      vst1q_s16(remainder + i + 4 * k, vuzp1q_s16(first, second));
    }
  }
};

// --- the two stages ------------------------------------------------------------------------------

template <typename GradientCode, typename Weights>
struct Loop {
  const Factors by;
  const LoadedConstants& loaded;
  const GradientCode* gradient;
  float* first;
  float* second;
  Weights weights;

  // Leaves the denominators of the changes.
  FSDP_INLINED void update_moments(int64_t i, Group& denominators) const {
    Group gradients;
    load(gradient + i, gradients);
    for (int k = 0; k < kVectors; ++k) {
      float* const first_at = first + i + 4 * k;
      float* const second_at = second + i + 4 * k;
      const Vector g = gradients[k];
      const Vector m = vfmaq_f32(vmulq_f32(vld1q_f32(first_at), by.beta1), g, by.to_first);
      const Vector scaled = vmulq_f32(g, by.to_second);
      const Vector v = vfmaq_f32(vmulq_f32(vld1q_f32(second_at), by.beta2), scaled, scaled);
      vst1q_f32(first_at, m);
      vst1q_f32(second_at, v);
      denominators[k] = vfmaq_f32(loaded.eps, vsqrtq_f32(v), by.root);
    }
  }

  // Whether exact_quotient may have the first vectors of a group whose moments are updated.
  FSDP_INLINED bool multiplies(int64_t i) const {
    constexpr int kNumel = 4 * kMultiplied;
    return (without_exact_quotients<kNumel>(first + i) | at_least_2_to_65<kNumel>(second + i)) == 0;
  }

  template <int kMultipliedHere>
  FSDP_INLINED void update_weights(int64_t i, const Group& denominators) const {
    Group changes, group;
    for (int k = 0; k < kVectors; ++k) {
      const Vector m = vld1q_f32(first + i + 4 * k);
      const Vector d = denominators[k];
      changes[k] = k < kMultipliedHere ? exact_quotient(m, d, loaded.one) : vdivq_f32(m, d);
    }
    weights.load(i, group);
    for (int k = 0; k < kVectors; ++k) group[k] = vfmaq_f32(changes[k], group[k], by.decay);
    weights.store(i, group);
  }

  // The weights at `i`, and the moments of the next group. The test comes first, so that nothing
  // separates the two stages.
  FSDP_INLINED void advance(int64_t i, const Group& denominators, Group& next) const {
    if (multiplies(i)) [[likely]] {
      update_moments(i + kGroup, next);
      update_weights<kMultiplied>(i, denominators);
    } else {
      update_moments(i + kGroup, next);
      update_weights<0>(i, denominators);
    }
  }

  // Updates an odd number of groups, as many as there are, and returns the number of elements. Two
  // groups per iteration, so that denominators need not be moved between registers.
  FSDP_INLINED int64_t run(int64_t numel) const {
    if (numel < kGroup) return 0;
    Group even, odd;
    update_moments(0, even);
    int64_t i = 0;
    for (; i + 3 * kGroup <= numel; i += 2 * kGroup) {
      advance(i, even, odd);
      advance(i + kGroup, odd, even);
    }
    update_weights<0>(i, even);
    return i + kGroup;
  }
};

// --- spans ---------------------------------------------------------------------------------------

// Of moments that pass the tests in Loop::multiplies: their roots are below 2^33.
inline bool has_exact_divisors(const AdamWFactors& by) {
  const float largest = -(by.root * 0x1p33f + by.eps);
  return -by.eps >= kMinExactDivisor && -by.root >= 0.0f && largest <= kMaxExactDivisor;
}

// A function of its own for each kind of loop: compilers find better registers for it there.
template <typename GradientCode, typename Weights>
[[gnu::noinline]] int64_t run_loop(const AdamWFactors& by, const GradientCode* gradient,
                                   float* first, float* second, Weights weights, int64_t numel) {
  const LoadedConstants loaded{.eps = vdupq_n_f32(by.eps), .one = vdupq_n_f32(1.0f)};
  const Loop<GradientCode, Weights> loop{Factors(by), loaded, gradient, first, second, weights};
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

// Updates elements from `begin` on and returns how many: none where a type or a factor is not for
// this loop, and not the last few.
inline int64_t update(const AdamWFactors& by, const UpdateSpan& span, int64_t begin,
                      int64_t numel) {
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
