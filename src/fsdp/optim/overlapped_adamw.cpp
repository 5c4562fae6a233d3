#include "fsdp/optim/overlapped_adamw.h"

#if defined(__aarch64__)

#include <array>

#include "fsdp/base/inlined.h"
#include "fsdp/optim/exact_quotient.h"
#include "fsdp/optim/narrow_vectors.h"
#include "fsdp/optim/overlapped_code.h"
#include "fsdp/optim/overlapped_orders.h"

namespace fsdp::overlapped {

namespace {

using Vector = float32x4_t;
using vectors::as_bits;
using vectors::as_floats;

// --- code ----------------------------------------------------------------------------------------

constexpr int index_of(Kind kind) {
  return static_cast<int>(kind.weights) * 2 + static_cast<int>(kind.gradients);
}

// Beside functions, where memory may be executed.
[[gnu::section(".text.overlapped_adamw")]] constexpr std::array<Code, 6> kCodes = [] {
  std::array<Code, 6> codes{};
  for (const Found& found : kFound)
    codes[index_of(found.kind)] = assembled(Operations(found.kind), found.order);
  return codes;
}();

constexpr bool are_all_assembled() {
  for (const Found& found : kFound)
    if (!is_order(Operations(found.kind), found.order)) return false;
  for (const Code& code : kCodes)
    if (code.count == 0) return false;
  return true;
}
static_assert(are_all_assembled());

using Function = void (*)(Frame*);
Function function_of(Kind kind) {
  return reinterpret_cast<Function>(kCodes[index_of(kind)].words.data());
}

// --- the same for groups that the code does not take ---------------------------------------------

FSDP_INLINED Vector loaded(const FourFloats& four) { return vld1q_f32(four.values); }

template <typename Word>
FSDP_INLINED Word* at(void* group, int64_t element) {
  return static_cast<Word*>(group) + element;
}

FSDP_INLINED Vector widened(uint16x8_t bf16, int k) {
  return as_floats(k % 2 == 0 ? vshll_n_u16(vget_low_u16(bf16), 16) : vshll_high_n_u16(bf16, 16));
}

template <Kind kKind>
struct Group {
  static constexpr bool kHasHalfGradients = kKind.gradients == Gradients::kBf16;
  static constexpr bool kIsSplit = kKind.weights == Weights::kSplit;

  Frame& frame;

  FSDP_INLINED Vector gradient(int64_t begin, int k) const {
    if constexpr (kHasHalfGradients) {
      const auto* half = static_cast<const uint16_t*>(frame.gradient) + begin + k / 2 * 8;
      return widened(vld1q_u16(half), k);
    } else {
      return vld1q_f32(static_cast<const float*>(frame.gradient) + begin + 4 * k);
    }
  }

  // Of the group so many elements from here; true if its quotients may come from multiplications.
  FSDP_INLINED bool update_moments(int64_t begin) const {
    ExactQuotientTest test;
    for (int k = 0; k < kVectors; ++k) {
      float* const first = at<float>(frame.first, begin + 4 * k);
      float* const second = at<float>(frame.second, begin + 4 * k);
      const Vector g = gradient(begin, k);
      const Vector scaled = vmulq_f32(g, loaded(frame.to_second));
      const Vector m = vmulq_f32(vld1q_f32(first), loaded(frame.beta1));
      const Vector v = vmulq_f32(vld1q_f32(second), loaded(frame.beta2));
      const Vector new_v = vfmaq_f32(v, scaled, scaled);
      vst1q_f32(first, vfmaq_f32(m, g, loaded(frame.to_first)));
      vst1q_f32(second, new_v);
      vst1q_f32(frame.denominators[k].values,
                vfmaq_f32(loaded(frame.eps), vsqrtq_f32(new_v), loaded(frame.root)));
      if (k >= kMultiplied) continue;
      test.take_dividends(first);
      test.take_second_moments(second);
    }
    return test.passes();
  }

  FSDP_INLINED Vector weight(int k) const {
    if constexpr (!kIsSplit) return vld1q_f32(at<float>(frame.weight, 4 * k));
    const int16x8_t lower = vld1q_s16(at<int16_t>(frame.lower, k / 2 * 8));
    const auto upper =
        vreinterpretq_s32_f32(widened(vld1q_u16(at<uint16_t>(frame.weight, k / 2 * 8)), k));
    return vreinterpretq_f32_s32(k % 2 == 0 ? vaddw_s16(upper, vget_low_s16(lower))
                                            : vaddw_high_s16(upper, lower));
  }

  // The weights of this group, divided by the unit.
  FSDP_INLINED void update_weights() const {
    for (int pair = 0; pair < kVectors / 2; ++pair) {
      Vector updated[2];
      for (int i = 0; i < 2; ++i) {
        const int k = 2 * pair + i;
        const Vector change =
            vdivq_f32(vld1q_f32(at<float>(frame.first, 4 * k)), loaded(frame.denominators[k]));
        updated[i] = vfmaq_f32(change, weight(k), loaded(frame.decay));
      }
      store(pair, updated[0], updated[1]);
    }
  }

  // rounded_away needs no test here: DefaultNan gives every NaN its usual form.
  FSDP_INLINED void store(int pair, Vector low, Vector high) const {
    const uint16x8_t rounded = vrshrn_high_n_u32(vrshrn_n_u32(as_bits(low), 16), as_bits(high), 16);
    if constexpr (kIsSplit) {
      vst1q_u16(at<uint16_t>(frame.weight, 8 * pair), rounded);
      vst1q_s16(at<int16_t>(frame.lower, 8 * pair),
                vuzp1q_s16(vreinterpretq_s16_f32(low), vreinterpretq_s16_f32(high)));
    } else {
      vst1q_f32(at<float>(frame.weight, 8 * pair), low);
      vst1q_f32(at<float>(frame.weight, 8 * pair + 4), high);
    }
    if constexpr (kKind.weights == Weights::kSeparate)
      vst1q_u16(at<uint16_t>(frame.lower, 8 * pair), rounded);
  }

  FSDP_INLINED void advance() const {
    frame.gradient = static_cast<const std::byte*>(frame.gradient) + kGroup * gradient_bytes(kKind);
    frame.first = at<float>(frame.first, kGroup);
    frame.second = at<float>(frame.second, kGroup);
    frame.weight = at<std::byte>(frame.weight, kGroup * weight_bytes(kKind));
    if (frame.lower != nullptr) frame.lower = at<uint16_t>(frame.lower, kGroup);
    --frame.groups;
  }
};

// Updates all groups of a frame.
template <Kind kKind>
void run(Frame& frame) {
  const Group<kKind> group{frame};
  bool passes = group.update_moments(0);
  for (--frame.groups; frame.groups > 0;) {
    if (passes) {
      function_of(kKind)(&frame);
      passes = frame.failed == 0;
    } else {
      group.update_weights();
      passes = group.update_moments(kGroup);
      group.advance();
    }
  }
  group.update_weights();
}

// --- spans ---------------------------------------------------------------------------------------

// Of moments that pass the tests: their roots are below 2^33.
bool has_exact_divisors(const AdamWFactors& by) {
  const float largest = -(by.root * 0x1p33f + by.eps);
  return -by.eps >= kMinExactDivisor && -by.root >= 0.0f && largest <= kMaxExactDivisor;
}

Frame frame_of(const AdamWFactors& by) {
  const auto four = [](float x) { return FourFloats{{x, x, x, x}}; };
  return {.beta1 = four(by.beta1),
          .beta2 = four(by.beta2),
          .to_first = four(by.to_first),
          .to_second = four(by.to_second),
          .root = four(by.root),
          .decay = four(by.decay),
          .eps = four(by.eps),
          .one = four(1.0f),
          .tested = ExactQuotientTest::kTested,
          .added = ExactQuotientTest::kAdded,
          .carried = ExactQuotientTest::kCarried};
}

template <Gradients kGradients>
void run(Frame& frame, MainWeight main) {
  if (main == MainWeight::kIsWeight) run<Kind{kGradients, Weights::kWhole}>(frame);
  if (main == MainWeight::kSeparate) run<Kind{kGradients, Weights::kSeparate}>(frame);
  if (main == MainWeight::kSplit) run<Kind{kGradients, Weights::kSplit}>(frame);
}

}  // namespace

int64_t update(const AdamWFactors& by, const UpdateSpan& span, int64_t begin, int64_t numel) {
  const bool has_wide_moments =
      span.first.dtype == DType::kFloat32 && span.second.dtype == DType::kFloat32;
  const bool has_half_gradients = span.gradient_dtype == DType::kBFloat16;
  const DType weight = span.main == MainWeight::kIsWeight ? DType::kFloat32 : DType::kBFloat16;
  if (!has_wide_moments || !(has_half_gradients || span.gradient_dtype == DType::kFloat32) ||
      span.weight_dtype != weight || !has_exact_divisors(by) || numel < kGroup)
    return 0;

  const auto from = [&](void* array, DType dtype) -> void* {
    return static_cast<std::byte*>(array) + begin * element_bytes(dtype);
  };
  const bool is_separate = span.main == MainWeight::kSeparate;
  Frame frame = frame_of(by);
  frame.gradient =
      static_cast<const std::byte*>(span.gradient) + begin * element_bytes(span.gradient_dtype);
  frame.first = from(span.first.values, DType::kFloat32);
  frame.second = from(span.second.values, DType::kFloat32);
  frame.weight = is_separate ? from(span.main_weight, DType::kFloat32) : from(span.weight, weight);
  if (is_separate) frame.lower = from(span.weight, DType::kBFloat16);
  if (span.main == MainWeight::kSplit) frame.lower = from(span.main_weight, DType::kBFloat16);
  frame.groups = numel / kGroup;
  if (has_half_gradients) {
    run<Gradients::kBf16>(frame, span.main);
  } else {
    run<Gradients::kFp32>(frame, span.main);
  }
  return numel / kGroup * kGroup;
}

}  // namespace fsdp::overlapped

#endif  // __aarch64__
