#include "fsdp/optim/kernels/update_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/base/compiler.h"
#include "fsdp/base/integer.h"
#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/kernels/update_block.h"
#include "fsdp/optim/kernels/update_math.h"

namespace fsdp {

namespace {

using block::CodeStage;
using block::Place;
using block::Stage;

// Calls body(place) for every block of the range.
template <typename Body>
FSDP_INLINED void for_each_span_block(const UpdateSpan& span, ElementRange range, Body body) {
  for (int64_t begin = range.begin; begin < range.end;) {
    const int64_t position = span.flat_begin + begin;
    const int64_t count =
        std::min(range.end - begin, block::kMaxNumel - position % block::kMaxNumel);
    body(Place{.begin = begin, .count = count, .position = position});
    begin += count;
  }
}

// --- the rules on a block ------------------------------------------------------------------------

// Whether the second moment or its root is stored.
enum class Kept : uint8_t { kMoment, kRoot };

template <Kept kKept>
FSDP_INLINED void adamw_block(AdamWFactors by, const float* gradient, float* weight, float* first,
                              float* second, int64_t count) {
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    first[i] = adamw_first(by, gradient[i], first[i]);
    const float moment = adamw_second(by, gradient[i], second[i]);
    const float root = std::sqrt(moment);
    weight[i] = adamw_weight(by, first[i], root, weight[i]);
    second[i] = kKept == Kept::kRoot ? root : moment;
  }
}

// The usual types of mixed precision go through no stage: in one loop, conversions run beside the
// root and the division, which keep only one unit busy. (Moments are stored before weights, which
// wait for the division; the other order is slower.)
struct SplitWeights {
  uint16_t* upper;
  int16_t* remainder;

  FSDP_INLINED float load(int64_t i) const {
    return join_weight({.upper = upper[i], .remainder = remainder[i]});
  }
  // Returns the bits of the weight that change.
  FSDP_INLINED uint16_t store(int64_t i, float value) const {
    const SplitWeight split = split_weight(value);
    const uint16_t before = upper[i];
    upper[i] = split.upper;
    remainder[i] = split.remainder;
    return before ^ split.upper;
  }
};

struct SeparateWeights {
  uint16_t* weight;
  float* main;

  FSDP_INLINED float load(int64_t i) const { return main[i]; }
  FSDP_INLINED uint16_t store(int64_t i, float value) const {
    const uint16_t before = rounded_away(main[i]);  // on a host `weight` may be a device's copy
    main[i] = value;
    weight[i] = rounded_away(value);
    return before ^ weight[i];
  }
};

// fp32 without a main weight: only where marks are set, which would take a copy of it otherwise.
struct WideWeights {
  float* weight;

  FSDP_INLINED float load(int64_t i) const { return weight[i]; }
  FSDP_INLINED uint16_t store(int64_t i, float value) const {
    const auto before = std::bit_cast<uint32_t>(weight[i]);
    weight[i] = value;
    return before != std::bit_cast<uint32_t>(value) ? 1 : 0;
  }
};

// Both moments are of type Narrow; key(purpose, place) makes a RandomKey.
template <typename Gradient, typename Narrow, typename Weights, typename Key>
FSDP_INLINED void adamw_direct_block(AdamWFactors by, const UpdateSpan& span, const Place& place,
                                     Weights weights, Key key) {
  const auto* gradient = static_cast<const typename Gradient::Code*>(span.gradient) + place.begin;
  auto* first = static_cast<typename Narrow::Code*>(span.first.values) + place.begin;
  auto* second = static_cast<typename Narrow::Code*>(span.second.values) + place.begin;
  block::RandomStage stage;
  const block::RandomStage::Bits* random = nullptr;
  if constexpr (Narrow::kRounds)
    random = stage.draw(place, key(RandomPurpose::kSecondMoment, place));
  const auto update = [&](int64_t i) {
    float weight = weights.load(i);
    float m = Narrow::widened(first[i]);
    float v = Narrow::widened(second[i]);
    adamw_element(by, Gradient::widened(gradient[i]), weight, m, v);
    if constexpr (Narrow::kRounds) {
      first[i] = Narrow::nearest(m);
      second[i] = Narrow::stochastic(v, random[i]);
    } else {
      first[i] = m;
      second[i] = v;
    }
    return weights.store(i, weight);
  };
  if (span.marks != nullptr) return block::mark_where(span, place, update);
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < place.count; ++i) update(i);
}

template <typename Gradient, typename Narrow, typename Key>
FSDP_INLINED void adamw_direct_block(AdamWFactors by, const UpdateSpan& span, const Place& place,
                                     Key key) {
  auto* weight = static_cast<uint16_t*>(span.weight) + place.begin;
  if (span.main == MainWeight::kSplit) {
    auto* remainder = static_cast<int16_t*>(span.main_weight) + place.begin;
    adamw_direct_block<Gradient, Narrow>(by, span, place, SplitWeights{weight, remainder}, key);
  } else {
    auto* main = static_cast<float*>(span.main_weight) + place.begin;
    adamw_direct_block<Gradient, Narrow>(by, span, place, SeparateWeights{weight, main}, key);
  }
}

// Returns false, and does nothing, if a type needs a stage.
template <typename Key>
FSDP_INLINED bool update_directly(AdamWFactors by, const UpdateSpan& span, const Place& place,
                                  Key key) {
  const auto both_are = [&](DType dtype) {
    return span.first.dtype == dtype && span.second.dtype == dtype;
  };
  if (span.marks != nullptr && span.main == MainWeight::kIsWeight &&
      span.weight_dtype == DType::kFloat32 && span.gradient_dtype == DType::kFloat32 &&
      both_are(DType::kFloat32)) {
    const WideWeights weights{static_cast<float*>(span.weight) + place.begin};
    adamw_direct_block<Fp32, Fp32>(by, span, place, weights, key);
    return true;
  }
  if (span.main == MainWeight::kIsWeight || span.weight_dtype != DType::kBFloat16) return false;
  const bool is_wide = both_are(DType::kFloat32);
  if (!is_wide && !both_are(DType::kBFloat16)) return false;
  if (span.gradient_dtype == DType::kFloat32) {
    is_wide ? adamw_direct_block<Fp32, Fp32>(by, span, place, key)
            : adamw_direct_block<Fp32, Bf16>(by, span, place, key);
  } else if (span.gradient_dtype == DType::kBFloat16) {
    is_wide ? adamw_direct_block<Bf16, Fp32>(by, span, place, key)
            : adamw_direct_block<Bf16, Bf16>(by, span, place, key);
  } else {
    return false;
  }
  return true;
}

FSDP_INLINED void adamw_blocks(const UpdateSpan& span, const AdamWRule& rule,
                               const StepState& state, ElementRange range) {
  const AdamWFactors by = adamw_factors(rule, state, span);
  const auto key = [&](RandomPurpose purpose, const Place& place) {
    return random_key(rule.seed, state.step, span.group, purpose, place.position);
  };
  alignas(64) Stage gradient_stage, weight_stage, first_stage, second_stage;
  alignas(64) CodeStage code_stage;
  for_each_span_block(span, range, [&](const Place& place) {
    if (update_directly(by, span, place, key)) return;
    block::keep_codes(span, place, code_stage);
    const float* gradient = block::load_gradient(span, place, gradient_stage);
    float* weight = block::load_weight(span, place, weight_stage);
    float* first =
        block::load_moment<MomentRole::kFirst>(span.first, span.flat_begin, place, first_stage);
    float* second =
        block::load_moment<MomentRole::kSecond>(span.second, span.flat_begin, place, second_stage);
    is_scaled(span.second.dtype)
        ? adamw_block<Kept::kRoot>(by, gradient, weight, first, second, place.count)
        : adamw_block<Kept::kMoment>(by, gradient, weight, first, second, place.count);
    block::store_weight(span, place, weight, rule.rounding, key(RandomPurpose::kWeight, place));
    block::mark_changed(span, place, code_stage);
    block::store_first(first, span.first, span.flat_begin, place);
    block::store_second(second, span.second, span.flat_begin, place,
                        key(RandomPurpose::kSecondMoment, place));
  });
}

template <Momentum kMomentum>
FSDP_INLINED void sgd_block(SgdFactors by, const float* gradient, float* weight, float* buffer,
                            int64_t count) {
  FSDP_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (kMomentum == Momentum::kNone) {
      float none = 0.0f;
      sgd_element<kMomentum>(by, gradient[i], weight[i], none);
    } else {
      sgd_element<kMomentum>(by, gradient[i], weight[i], buffer[i]);
    }
  }
}

FSDP_INLINED void sgd_blocks(const UpdateSpan& span, const SgdRule& rule, const StepState& state,
                             ElementRange range) {
  const SgdFactors by = sgd_factors(rule, state, span.rate_scale, span.weight_decay);
  const Momentum momentum = momentum_kind(rule);
  alignas(64) Stage gradient_stage, weight_stage, buffer_stage;
  alignas(64) CodeStage code_stage;
  for_each_span_block(span, range, [&](const Place& place) {
    block::keep_codes(span, place, code_stage);
    const float* gradient = block::load_gradient(span, place, gradient_stage);
    float* weight = block::load_weight(span, place, weight_stage);
    if (momentum == Momentum::kNone) {
      sgd_block<Momentum::kNone>(by, gradient, weight, nullptr, place.count);
    } else {
      float* buffer =
          block::load_moment<MomentRole::kFirst>(span.first, span.flat_begin, place, buffer_stage);
      if (momentum == Momentum::kPlain) {
        sgd_block<Momentum::kPlain>(by, gradient, weight, buffer, place.count);
      } else {
        sgd_block<Momentum::kNesterov>(by, gradient, weight, buffer, place.count);
      }
      block::store_first(buffer, span.first, span.flat_begin, place);
    }
    const RandomKey key =
        random_key(rule.seed, state.step, span.group, RandomPurpose::kWeight, place.position);
    block::store_weight(span, place, weight, rule.rounding, key);
    block::mark_changed(span, place, code_stage);
  });
}

// --- instruction sets ----------------------------------------------------------------------------

// Flattened, so that every loop is compiled for the caller's instruction set. Compilers assume an
// x86-64 of 2003, without AVX2 and fused operations; for aarch64 their default is sufficient. Wider
// vectors do not change a result: no operation is contracted or reordered.
#define FSDP_FLATTENED [[gnu::flatten, gnu::noinline]]

FSDP_FLATTENED void adamw_baseline(const UpdateSpan& span, const AdamWRule& rule,
                                   const StepState& state, ElementRange range) {
  adamw_blocks(span, rule, state, range);
}

FSDP_FLATTENED void sgd_baseline(const UpdateSpan& span, const SgdRule& rule,
                                 const StepState& state, ElementRange range) {
  sgd_blocks(span, rule, state, range);
}

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] FSDP_FLATTENED void adamw_avx2(const UpdateSpan& span,
                                                           const AdamWRule& rule,
                                                           const StepState& state,
                                                           ElementRange range) {
  adamw_blocks(span, rule, state, range);
}

[[gnu::target("avx2,fma")]] FSDP_FLATTENED void sgd_avx2(const UpdateSpan& span,
                                                         const SgdRule& rule,
                                                         const StepState& state,
                                                         ElementRange range) {
  sgd_blocks(span, rule, state, range);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  return has;
}
#endif

}  // namespace

ElementRange piece_of_span(const UpdateSpan& span, int64_t index, int64_t count) {
  FSDP_ASSERT(0 <= index && index < count, index, " of ", count);
  const auto cut = [&](int64_t piece) {
    if (piece == 0) return int64_t{0};
    if (piece == count) return span.numel;
    // About even, then up to the end of a block of scales.
    const int64_t position = span.flat_begin + span.numel / count * piece;
    return std::min(round_up(position, kScaleBlock) - span.flat_begin, span.numel);
  };
  return {.begin = cut(index), .end = cut(index + 1)};
}

void adamw_on_cpu(const UpdateSpan& span, const AdamWRule& rule, const StepState& state,
                  ElementRange range) {
  if (state.skips != 0) return;
#if defined(__x86_64__)
  if (has_avx2()) return adamw_avx2(span, rule, state, range);
#endif
  adamw_baseline(span, rule, state, range);
}

void sgd_on_cpu(const UpdateSpan& span, const SgdRule& rule, const StepState& state,
                ElementRange range) {
  if (state.skips != 0) return;
#if defined(__x86_64__)
  if (has_avx2()) return sgd_avx2(span, rule, state, range);
#endif
  sgd_baseline(span, rule, state, range);
}

}  // namespace fsdp
