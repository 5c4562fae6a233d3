// AdamW's moments in any type, sixteen elements at a time (aarch64): the bits of adamw_math.h and
// moment_code.h.
//
// update() takes the gradients of sixteen elements. When a block of scales is updated, end() sets
// its scale and says what is left to do, which store() does later: the maximum that a scale is made
// of takes a while.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <bit>
#include <cstdint>

#include "fsdp/base/inlined.h"
#include "fsdp/optim/adamw_math.h"
#include "fsdp/optim/moment_code.h"
#include "fsdp/optim/narrow_vectors.h"
#include "fsdp/optim/random_vectors.h"
#include "fsdp/optim/update_block.h"

namespace fsdp::narrow {

using block::Place;
using vectors::as_bits;
using vectors::as_floats;
using vectors::Codes;
using vectors::Sixteen;

// What is left to store of a block's moments.
enum class Left : uint8_t {
  kNothing,
  kNormal,  // all of them normal numbers of the type
  kFinite,
  kAny,  // Inf or NaN among them
};

// --- the rule ------------------------------------------------------------------------------------

struct Factors {
  explicit Factors(const AdamWFactors& by)
      : beta1(vdupq_n_f32(by.beta1)),
        beta2(vdupq_n_f32(by.beta2)),
        to_first(vdupq_n_f32(by.to_first)),
        to_second(vdupq_n_f32(by.to_second)),
        root(vdupq_n_f32(by.root)),
        decay(vdupq_n_f32(by.decay)) {}

  float32x4_t beta1, beta2, to_first, to_second, root, decay;
};

FSDP_INLINED Sixteen updated_first(const Factors& by, const Sixteen& first,
                                   const Sixteen& gradient) {
  const auto updated = [&](float32x4_t m, float32x4_t g) {
    return vfmaq_f32(vmulq_f32(m, by.beta1), g, by.to_first);
  };
  return vectors::each(updated, first, gradient);
}

FSDP_INLINED Sixteen updated_second(const Factors& by, const Sixteen& second,
                                    const Sixteen& gradient) {
  const auto updated = [&](float32x4_t v, float32x4_t g) {
    const float32x4_t scaled = vmulq_f32(g, by.to_second);
    return vfmaq_f32(vmulq_f32(v, by.beta2), scaled, scaled);
  };
  return vectors::each(updated, second, gradient);
}

FSDP_INLINED Sixteen roots_of(const Sixteen& values) {
  return vectors::each([](float32x4_t part) { return vsqrtq_f32(part); }, values);
}

// Of the bits.
FSDP_INLINED uint32x4_t largest_of(const Sixteen& values) {
  return vmaxq_u32(vmaxq_u32(as_bits(values.a), as_bits(values.b)),
                   vmaxq_u32(as_bits(values.c), as_bits(values.d)));
}
FSDP_INLINED uint32x4_t least_of(const Sixteen& values) {
  return vminq_u32(vminq_u32(as_bits(values.a), as_bits(values.b)),
                   vminq_u32(as_bits(values.c), as_bits(values.d)));
}

// --- first moments -------------------------------------------------------------------------------

// Of a scaled type.
template <typename Narrow>
class First {
 public:
  First(const UpdateSpan& span, const Place& place, const RandomVectors&)
      : codes_(static_cast<const typename Narrow::Code*>(span.first.values) + place.begin),
        scale_(block::scale_at(span.first, span.flat_begin, place.position)),
        before_(vdupq_n_f32(scale_)) {}

  // The new moments, which the caller keeps for store().
  FSDP_INLINED Sixteen update(const Factors& by, int64_t i, const Sixteen& gradient) {
    const Sixteen before = vectors::product(Codes<Narrow>::load(codes_ + i), before_);
    const Sixteen after = updated_first(by, before, gradient);
    largest_ = vmaxq_u32(largest_, largest_of(vectors::each(twice, after)));
    return after;
  }

  FSDP_INLINED Left end(const float* values) const {
    const uint32_t largest = vmaxvq_u32(largest_) / 2;
    const bool is_finite = largest < 0x7F800000u;
    scale_ =
        block_scale<Narrow>(is_finite ? largest : block::largest_magnitude(values, kScaleBlock));
    return is_finite ? Left::kFinite : Left::kAny;
  }

  FSDP_INLINED static void store(const UpdateSpan& span, const Place& place, const RandomVectors&,
                                 const float* values, Left left) {
    if (left == Left::kAny)
      return block::store_scaled<Narrow>(values, span.first, span.flat_begin, place);
    auto* codes = static_cast<typename Narrow::Code*>(span.first.values) + place.begin;
    const float scale = block::scale_at(span.first, span.flat_begin, place.position);
    const float32x4_t inverse = vdupq_n_f32(inverse_scale(scale));
    for (int64_t i = 0; i < kScaleBlock; i += 16)
      Codes<Narrow>::store_nearest(codes + i, vectors::product(vectors::load(values + i), inverse));
  }

 private:
  // Bits without the sign.
  FSDP_INLINED static float32x4_t twice(float32x4_t values) {
    return as_floats(vaddq_u32(as_bits(values), as_bits(values)));
  }

  const typename Narrow::Code* codes_;
  float& scale_;
  float32x4_t before_;
  uint32x4_t largest_ = vdupq_n_u32(0);  // twice the bits
};

template <>
class First<Bf16> {
 public:
  First(const UpdateSpan& span, const Place& place, const RandomVectors&)
      : codes_(static_cast<uint16_t*>(span.first.values) + place.begin) {}

  FSDP_INLINED Sixteen update(const Factors& by, int64_t i, const Sixteen& gradient) const {
    const Sixteen after = updated_first(by, Codes<Bf16>::load(codes_ + i), gradient);
    Codes<Bf16>::store_nearest(codes_ + i, after);
    return after;
  }
  static Left end(const float*) { return Left::kNothing; }

 private:
  uint16_t* codes_;
};

// The caller keeps them where they are.
template <>
class First<Fp32> {
 public:
  First(const UpdateSpan& span, const Place& place, const RandomVectors&)
      : values_(static_cast<const float*>(span.first.values) + place.begin) {}

  FSDP_INLINED Sixteen update(const Factors& by, int64_t i, const Sixteen& gradient) const {
    return updated_first(by, vectors::load(values_ + i), gradient);
  }
  static Left end(const float*) { return Left::kNothing; }

 private:
  const float* values_;
};

// --- second moments ------------------------------------------------------------------------------

// Which of its neighbours a scaled root becomes: root_goes_up, with fused operations. Squares of
// neighbours and their differences have few enough bits to be exact, so that those round alike.
// `random` lies where root_goes_up moves it.
FSDP_INLINED float32x4_t chosen_root(float32x4_t root, float32x4_t below, float32x4_t above,
                                     uint32x4_t random) {
  const float32x4_t part = as_floats(vorrq_u32(random, vdupq_n_u32(0x3F800040u)));  // and 1
  const float32x4_t gap = vfmsq_f32(vmulq_f32(below, below), above, above);         // negative
  const float32x4_t bound = vfmsq_f32(gap, part, gap);
  const float32x4_t past = vfmsq_f32(vmulq_f32(root, root), below, below);
  return vbslq_f32(vcltq_f32(bound, past), above, below);
}

// What root_code makes of a scaled root, as a number.
template <typename Narrow, Left kLeft>
FSDP_INLINED float32x4_t rounded_root(float32x4_t root, uint32x4_t random) {
  constexpr uint32_t kStep = std::bit_cast<uint32_t>(Narrow::kMinNormal + Narrow::kMinSubnormal) -
                             std::bit_cast<uint32_t>(Narrow::kMinNormal);
  const auto cut = [](float32x4_t values) {
    return vandq_u32(as_bits(values), vdupq_n_u32(~(kStep - 1)));
  };
  const auto next = [](uint32x4_t low) { return as_floats(vaddq_u32(low, vdupq_n_u32(kStep))); };
  if constexpr (kLeft == Left::kNormal) {
    const uint32x4_t low = cut(root);
    return chosen_root(root, as_floats(low), next(low), random);
  }
  const float32x4_t least_normal = vdupq_n_f32(Narrow::kMinNormal);
  const uint32x4_t is_subnormal = vcltq_f32(root, least_normal);
  const float32x4_t by = as_floats(vandq_u32(is_subnormal, as_bits(least_normal)));
  const uint32x4_t low = cut(vaddq_f32(root, by));
  const float32x4_t chosen =
      chosen_root(root, vsubq_f32(as_floats(low), by), vsubq_f32(next(low), by), random);
  // Never 0, unless the root is.
  const uint32x4_t is_positive = vtstq_u32(as_bits(root), as_bits(root));
  const uint32x4_t least = vandq_u32(is_positive, as_bits(vdupq_n_f32(Narrow::kMinSubnormal)));
  return as_floats(vmaxq_u32(as_bits(chosen), least));
}

// Of a scaled type. All update() return the roots.
template <typename Narrow>
class Second {
 public:
  Second(const UpdateSpan& span, const Place& place, const RandomVectors&)
      : codes_(static_cast<const typename Narrow::Code*>(span.second.values) + place.begin),
        scale_(block::scale_at(span.second, span.flat_begin, place.position)),
        before_(vdupq_n_f32(scale_)) {}

  // The caller keeps them for store().
  FSDP_INLINED Sixteen update(const Factors& by, int64_t i, const Sixteen& gradient) {
    const Sixteen before = vectors::product(Codes<Narrow>::load(codes_ + i), before_);
    const auto square = [](float32x4_t root) { return vmulq_f32(root, root); };
    const Sixteen roots = roots_of(updated_second(by, vectors::each(square, before), gradient));
    largest_ = vmaxq_u32(largest_, largest_of(roots));
    least_ = vminq_u32(least_, least_of(roots));
    return roots;
  }

  FSDP_INLINED Left end(const float* roots) const {
    const uint32_t largest = vmaxvq_u32(largest_);
    const bool is_finite = largest < 0x7F800000u;
    scale_ =
        block_scale<Narrow>(is_finite ? largest : block::largest_magnitude(roots, kScaleBlock));
    if (!is_finite) return Left::kAny;
    const auto least = std::bit_cast<float>(vminvq_u32(least_));
    return least * inverse_scale(scale_) >= Narrow::kMinNormal ? Left::kNormal : Left::kFinite;
  }

  FSDP_INLINED static void store(const UpdateSpan& span, const Place& place,
                                 const RandomVectors& random, const float* roots, Left left) {
    if (left == Left::kNormal) return store_as<Left::kNormal>(span, place, random, roots);
    if (left == Left::kFinite) return store_as<Left::kFinite>(span, place, random, roots);
    block::store_roots<Narrow>(roots, span.second, span.flat_begin, place, random.key());
  }

 private:
  template <Left kLeft>
  FSDP_INLINED static void store_as(const UpdateSpan& span, const Place& place,
                                    const RandomVectors& random, const float* roots) {
    auto* codes = static_cast<typename Narrow::Code*>(span.second.values) + place.begin;
    const float scale = block::scale_at(span.second, span.flat_begin, place.position);
    const float32x4_t inverse = vdupq_n_f32(inverse_scale(scale));
    const RandomVectors::Bits bits = random.from(place.position);
    for (int64_t i = 0; i < kScaleBlock; i += 16) {
      const Sixteen scaled = vectors::product(vectors::load(roots + i), inverse);
      const vectors::Halves drawn = bits.at(i);
      const Sixteen moved = {as_floats(vshll_n_u16(vget_low_u16(drawn.low), 7)),
                             as_floats(vshll_high_n_u16(drawn.low, 7)),
                             as_floats(vshll_n_u16(vget_low_u16(drawn.high), 7)),
                             as_floats(vshll_high_n_u16(drawn.high, 7))};
      const auto rounded = [](float32x4_t root, float32x4_t part) {
        return rounded_root<Narrow, kLeft>(root, as_bits(part));
      };
      Codes<Narrow>::store_exact(codes + i, vectors::each(rounded, scaled, moved));
    }
  }

  const typename Narrow::Code* codes_;
  float& scale_;
  float32x4_t before_;
  uint32x4_t largest_ = vdupq_n_u32(0);
  uint32x4_t least_ = vdupq_n_u32(~0u);
};

template <>
class Second<Bf16> {
 public:
  Second(const UpdateSpan& span, const Place& place, const RandomVectors& random)
      : codes_(static_cast<uint16_t*>(span.second.values) + place.begin),
        random_(random.from(place.position)) {}

  FSDP_INLINED Sixteen update(const Factors& by, int64_t i, const Sixteen& gradient) const {
    const Sixteen after = updated_second(by, Codes<Bf16>::load(codes_ + i), gradient);
    Codes<Bf16>::store_stochastic(codes_ + i, after, random_.at(i));
    return roots_of(after);
  }
  static Left end(const float*) { return Left::kNothing; }

 private:
  uint16_t* codes_;
  RandomVectors::Bits random_;
};

template <>
class Second<Fp32> {
 public:
  Second(const UpdateSpan& span, const Place& place, const RandomVectors&)
      : values_(static_cast<float*>(span.second.values) + place.begin) {}

  FSDP_INLINED Sixteen update(const Factors& by, int64_t i, const Sixteen& gradient) const {
    const Sixteen after = updated_second(by, vectors::load(values_ + i), gradient);
    vectors::store(values_ + i, after);
    return roots_of(after);
  }
  static Left end(const float*) { return Left::kNothing; }

 private:
  float* values_;
};

}  // namespace fsdp::narrow

#endif  // __aarch64__
