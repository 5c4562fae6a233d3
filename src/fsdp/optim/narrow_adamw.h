// AdamW with narrow moments or weights (aarch64), in whole blocks of scales: what lies around them
// is left to the loops of update_on_cpu.cpp. The same bits as adamw_element and moment_code.h.
//
// One loop updates everything where both moments are bf16, the usual ones. Others go through
// several with stages between them: one for the moments, which a root waits in, one for the
// weights, which a division waits in, and one for each moment that had to wait for its scale. So
// the types of gradients, moments and weights add up instead of being multiplied.
#pragma once

#if defined(__aarch64__)

#include <algorithm>
#include <array>
#include <cstdint>

#include "fsdp/optim/narrow_moments.h"
#include "fsdp/optim/narrow_weights.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_on_cpu.h"
#include "fsdp/optim/update_rules.h"
#include "fsdp/optim/update_span.h"

namespace fsdp::narrow {

// Constants that operations overwrite. They are loaded each time: a copy of a register would take a
// vector unit's time.
struct LoadedConstants {
  volatile float32x4_t eps;
  volatile float32x4_t one;
};

// Elements that go through a loop at once: whole blocks of scales. A place does not reach over a
// multiple of it in flat positions.
inline constexpr int64_t kMaxNumel = RandomVectors::kWindow;
static_assert(kMaxNumel % kScaleBlock == 0);

struct alignas(64) Stages {
  float gradient[kMaxNumel];
  float first[kMaxNumel];
  float roots[kMaxNumel];
};

// What is left to store of every block of scales.
struct BlockLeft {
  Left first;
  Left second;
};
using AllLeft = std::array<BlockLeft, kMaxNumel / kScaleBlock>;

// Calls body(offset, place, left) for the blocks of scales of a place.
template <typename Body>
FSDP_INLINED void for_each_block(const Place& place, AllLeft& left, const Body& body) {
  for (int64_t offset = 0; offset < place.count; offset += kScaleBlock) {
    const Place part{
        .begin = place.begin + offset, .count = kScaleBlock, .position = place.position + offset};
    body(offset, part, left[static_cast<size_t>(offset / kScaleBlock)]);
  }
}

// What does not change within a span.
struct Step {
  const UpdateSpan& span;
  const AdamWFactors& by;
  Rounding rounding;
  RandomVectors for_second;
  RandomVectors for_weight;
};

// --- loops ---------------------------------------------------------------------------------------

template <typename Weights>
FSDP_INLINED void update_weights(const Factors& by, const LoadedConstants& loaded, int64_t i,
                                 const Sixteen& first, const Sixteen& roots,
                                 const Weights& weights) {
  const Sixteen before = weights.load(i);
  const auto updated = [&](float32x4_t w, float32x4_t m, float32x4_t root) {
    const float32x4_t denominator = vfmaq_f32(loaded.eps, root, by.root);
    return vfmaq_f32(vdivq_f32(m, denominator), w, by.decay);
  };
  weights.store(i, vectors::each(updated, before, first, roots));
}

template <typename Gradient, typename Weights>
[[gnu::noinline]] void update_at_once(const Step& step, const Place& place,
                                      const typename Gradient::Code* gradient,
                                      const Weights& weights) {
  const Factors by(step.by);
  const LoadedConstants loaded{.eps = vdupq_n_f32(step.by.eps), .one = vdupq_n_f32(1.0f)};
  const First<Bf16> first(step.span, place, step.for_second);
  const Second<Bf16> second(step.span, place, step.for_second);
  Sixteen g = Codes<Gradient>::load(gradient);
  Sixteen m = first.update(by, 0, g);
  Sixteen roots = second.update(by, 0, g);
  // Weights wait for a root and a division: the next moments have their turn before them.
  for (int64_t i = 16; i < place.count; i += 16) {
    g = Codes<Gradient>::load(gradient + i);
    const Sixteen next_m = first.update(by, i, g);
    const Sixteen next_roots = second.update(by, i, g);
    update_weights(by, loaded, i - 16, m, roots, weights);
    m = next_m;
    roots = next_roots;
  }
  update_weights(by, loaded, place.count - 16, m, roots, weights);
}

// Leaves new first moments and the roots of second ones in stages. (First moments in fp32 are their
// own stage.)
template <typename First, typename Second>
[[gnu::noinline]] void update_moments(const Step& step, const Place& place, const float* gradient,
                                      float* firsts, float* roots, AllLeft& all_left) {
  const Factors by(step.by);
  for_each_block(place, all_left, [&](int64_t offset, const Place& part, BlockLeft& left) {
    First first(step.span, part, step.for_second);
    Second second(step.span, part, step.for_second);
    for (int64_t i = 0; i < kScaleBlock; i += 16) {
      const Sixteen g = vectors::load(gradient + offset + i);
      const Sixteen m = first.update(by, i, g);
      const Sixteen r = second.update(by, i, g);
      vectors::store(firsts + offset + i, m);
      vectors::store(roots + offset + i, r);
    }
    left = {.first = first.end(firsts + offset), .second = second.end(roots + offset)};
  });
}

template <typename Moment>
[[gnu::noinline]] void store_moment(const Step& step, const Place& place, const float* values,
                                    AllLeft& all_left, Left BlockLeft::*left_of) {
  for_each_block(place, all_left, [&](int64_t offset, const Place& part, const BlockLeft& left) {
    Moment::store(step.span, part, step.for_second, values + offset, left.*left_of);
  });
}

template <typename Weights>
[[gnu::noinline]] void update_weights(const Step& step, int64_t count, const float* first,
                                      const float* roots, const Weights& weights) {
  const Factors by(step.by);
  const LoadedConstants loaded{.eps = vdupq_n_f32(step.by.eps), .one = vdupq_n_f32(1.0f)};
  for (int64_t i = 0; i < count; i += 16)
    update_weights(by, loaded, i, vectors::load(first + i), vectors::load(roots + i), weights);
}

// --- types ---------------------------------------------------------------------------------------

// Calls body with the type as an object.
template <typename Body>
FSDP_INLINED void with_scaled_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat16) return body(Fp16{});
  if (dtype == DType::kFloat8E4M3) return body(Fp8E4M3{});
  body(Fp8E5M2{});
}
template <typename Body>
FSDP_INLINED void with_moment_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(Fp32{});
  if (dtype == DType::kBFloat16) return body(Bf16{});
  with_scaled_type(dtype, body);
}
template <typename Body>
FSDP_INLINED void with_weight_type(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) return body(Bf16{});
  body(Fp16{});
}

// Calls body with the weights of a place.
template <typename Body>
FSDP_INLINED void with_weights(const Step& step, const Place& place, const Body& body) {
  const UpdateSpan& span = step.span;
  const auto at = [&]<typename Word>(Word* words) { return words + place.begin; };
  if (span.main == MainWeight::kSplit)
    return body(SplitWeights{at(static_cast<uint16_t*>(span.weight)),
                             at(static_cast<int16_t*>(span.main_weight))});
  const auto narrow = [&]<typename Narrow>(Narrow) {
    auto* weight = at(static_cast<typename Narrow::Code*>(span.weight));
    if (span.main == MainWeight::kSeparate)
      return body(SeparateWeights<Narrow>{weight, at(static_cast<float*>(span.main_weight))});
    if constexpr (std::is_same_v<Narrow, Fp32>) {
      body(WholeWeights{weight});
    } else if (step.rounding == Rounding::kStochastic) {
      body(StochasticWeights<Narrow>{weight, step.for_weight.from(place.position)});
    } else {
      body(NearestWeights<Narrow>{weight});
    }
  };
  if (span.weight_dtype == DType::kFloat32) return narrow(Fp32{});
  with_weight_type(span.weight_dtype, narrow);
}

// Gradients in fp32.
inline const float* wide_gradients(const UpdateSpan& span, const Place& place, float* stage) {
  if (span.gradient_dtype == DType::kFloat32)
    return static_cast<const float*>(span.gradient) + place.begin;
  with_weight_type(span.gradient_dtype, [&]<typename Narrow>(Narrow) {
    const auto* codes = static_cast<const typename Narrow::Code*>(span.gradient) + place.begin;
    for (int64_t i = 0; i < place.count; i += 16)
      vectors::store(stage + i, Codes<Narrow>::load(codes + i));
  });
  return stage;
}

inline void update_in_stages(const Step& step, const Place& place, Stages& stages) {
  const UpdateSpan& span = step.span;
  const float* gradient = wide_gradients(span, place, stages.gradient);
  float* first = span.first.dtype == DType::kFloat32
                     ? static_cast<float*>(span.first.values) + place.begin
                     : stages.first;
  AllLeft left;
  with_moment_type(span.first.dtype, [&]<typename OfFirst>(OfFirst) {
    with_moment_type(span.second.dtype, [&]<typename OfSecond>(OfSecond) {
      update_moments<First<OfFirst>, Second<OfSecond>>(step, place, gradient, first, stages.roots,
                                                       left);
    });
  });
  with_weights(step, place, [&](const auto& weights) {
    update_weights(step, place.count, first, stages.roots, weights);
  });
  if (is_scaled(span.first.dtype))
    with_scaled_type(span.first.dtype, [&]<typename Narrow>(Narrow) {
      store_moment<First<Narrow>>(step, place, first, left, &BlockLeft::first);
    });
  if (is_scaled(span.second.dtype))
    with_scaled_type(span.second.dtype, [&]<typename Narrow>(Narrow) {
      store_moment<Second<Narrow>>(step, place, stages.roots, left, &BlockLeft::second);
    });
}

inline void update_at_once(const Step& step, const Place& place, Stages& stages) {
  const UpdateSpan& span = step.span;
  with_weights(step, place, [&](const auto& weights) {
    if (span.gradient_dtype == DType::kBFloat16) {
      const auto* gradient = static_cast<const uint16_t*>(span.gradient) + place.begin;
      update_at_once<Bf16>(step, place, gradient, weights);
    } else {
      update_at_once<Fp32>(step, place, wide_gradients(span, place, stages.gradient), weights);
    }
  });
}

inline void update_place(Step& step, const Place& place, Stages& stages) {
  const UpdateSpan& span = step.span;
  step.for_second.move_to(place.position);
  step.for_weight.move_to(place.position);
  if (span.first.dtype == DType::kBFloat16 && span.second.dtype == DType::kBFloat16)
    return update_at_once(step, place, stages);
  update_in_stages(step, place, stages);
}

// The part of a range that consists of whole blocks of scales.
inline ElementRange whole_blocks(const UpdateSpan& span, ElementRange range) {
  const int64_t first = span.flat_begin + range.begin + kScaleBlock - 1;
  const int64_t end = (span.flat_begin + range.end) / kScaleBlock * kScaleBlock - span.flat_begin;
  const int64_t begin = std::min(first / kScaleBlock * kScaleBlock - span.flat_begin, range.end);
  return {.begin = begin, .end = std::max(begin, end)};
}

// Updates the whole blocks of scales in a range, and returns which those are.
inline ElementRange update(const AdamWFactors& by, const UpdateSpan& span, const AdamWRule& rule,
                           const StepState& state, ElementRange range) {
  const auto random = [&](RandomPurpose purpose) {
    return RandomVectors(rule.seed, state.step, span.group, purpose);
  };
  Step step{.span = span,
            .by = by,
            .rounding = rule.rounding,
            .for_second = random(RandomPurpose::kSecondMoment),
            .for_weight = random(RandomPurpose::kWeight)};
  Stages stages;
  const ElementRange whole = whole_blocks(span, range);
  for (int64_t begin = whole.begin; begin < whole.end;) {
    const int64_t position = span.flat_begin + begin;
    const int64_t count = std::min(whole.end - begin, kMaxNumel - position % kMaxNumel);
    update_place(step, {.begin = begin, .count = count, .position = position}, stages);
    begin += count;
  }
  return whole;
}

}  // namespace fsdp::narrow

#endif  // __aarch64__
