// Weights as an update finds and leaves them, sixteen at a time (aarch64): the bits of
// update_block.h.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>
#include <type_traits>

#include "fsdp/base/inlined.h"
#include "fsdp/optim/narrow_vectors.h"
#include "fsdp/optim/random_vectors.h"

namespace fsdp::narrow {

using vectors::Codes;
using vectors::Sixteen;

struct WholeWeights {
  float* weight;

  FSDP_INLINED Sixteen load(int64_t i) const { return vectors::load(weight + i); }
  FSDP_INLINED void store(int64_t i, const Sixteen& values) const {
    vectors::store(weight + i, values);
  }
};

// join_weight and split_weight.
struct SplitWeights {
  uint16_t* upper;
  int16_t* remainder;

  FSDP_INLINED Sixteen load(int64_t i) const {
    const Sixteen whole = Codes<Bf16>::load(upper + i);
    const int16x8_t low = vld1q_s16(remainder + i);
    const int16x8_t high = vld1q_s16(remainder + i + 8);
    const auto bits = [](float32x4_t part) { return vreinterpretq_s32_f32(part); };
    return {vreinterpretq_f32_s32(vaddw_s16(bits(whole.a), vget_low_s16(low))),
            vreinterpretq_f32_s32(vaddw_high_s16(bits(whole.b), low)),
            vreinterpretq_f32_s32(vaddw_s16(bits(whole.c), vget_low_s16(high))),
            vreinterpretq_f32_s32(vaddw_high_s16(bits(whole.d), high))};
  }
  FSDP_INLINED void store(int64_t i, const Sixteen& values) const {
    Codes<Bf16>::store_away(upper + i, values);
    const vectors::Halves lower = vectors::lower_halves(values);
    vst1q_s16(remainder + i, vreinterpretq_s16_u16(lower.low));
    vst1q_s16(remainder + i + 8, vreinterpretq_s16_u16(lower.high));
  }
};

template <typename Narrow>
struct SeparateWeights {
  typename Narrow::Code* weight;
  float* main;

  FSDP_INLINED Sixteen load(int64_t i) const { return vectors::load(main + i); }
  FSDP_INLINED void store(int64_t i, const Sixteen& values) const {
    vectors::store(main + i, values);
    if constexpr (std::is_same_v<Narrow, Fp32>) {
      vectors::store(weight + i, values);
    } else if constexpr (std::is_same_v<Narrow, Bf16>) {
      Codes<Bf16>::store_away(weight + i, values);
    } else {
      Codes<Narrow>::store_nearest(weight + i, values);
    }
  }
};

template <typename Narrow>
struct NearestWeights {
  typename Narrow::Code* weight;

  FSDP_INLINED Sixteen load(int64_t i) const { return Codes<Narrow>::load(weight + i); }
  FSDP_INLINED void store(int64_t i, const Sixteen& values) const {
    Codes<Narrow>::store_nearest(weight + i, values);
  }
};

template <typename Narrow>
struct StochasticWeights {
  typename Narrow::Code* weight;
  RandomVectors::Bits random;

  FSDP_INLINED Sixteen load(int64_t i) const { return Codes<Narrow>::load(weight + i); }
  FSDP_INLINED void store(int64_t i, const Sixteen& values) const {
    Codes<Narrow>::store_stochastic(weight + i, values, random.at(i));
  }
};

}  // namespace fsdp::narrow

#endif  // __aarch64__
