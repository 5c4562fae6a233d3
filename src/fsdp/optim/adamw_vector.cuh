// AdamW on four elements of a device at once: adamw_element's bits, with fewer instructions.
#pragma once

#include "fsdp/base/narrow_vector.cuh"
#include "fsdp/optim/adamw_math.h"

namespace fsdp {

// Note [Roots and quotients]
// A device's exact root and quotient are an estimate, a few fused operations, and a branch to
// something slower for numbers that are very large or small. Four elements have eight such
// branches, each of which the next one waits for. Here one test covers all of them: where every
// number is in a range in which the estimates can be made exact, they are; elsewhere the four
// elements go through adamw_element one by one.
//
// With v in [2^-80, 2^60], factors of the root in [2^-20, 2^30] and of eps up to 2^60, the
// denominator is in [2^-60, 2^61]; with m in [2^-65, 2^60] the quotient and what it leaves over are
// normal numbers, and the last fused operation rounds it correctly.

// Whether the factors allow it, the same for all elements.
__device__ inline bool are_plain(const AdamWFactors& by) {
  return by.root <= -0x1p-20f && by.root >= -0x1p30f && by.eps <= 0.0f && by.eps >= -0x1p60f;
}

namespace adamw {

// The largest of four distances from a lower bound, as bits of their magnitudes. What is below the
// bound becomes very large.
template <uint32_t kLeast>
__device__ uint32_t largest_above(const Numbers& values) {
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kVector; ++k)  // the sign is shifted out
    largest = max(largest, __float_as_uint(values.of[k]) * 2u - kLeast * 2u);
  return largest;
}

constexpr uint32_t power_bits(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }

__device__ inline float exact_root(float v) {
  float estimate;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(v));
  const float root = v * estimate;
  return fmaf(fmaf(-root, root, v), 0.5f * estimate, root);
}

__device__ inline float exact_quotient(float m, float d) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(d));
  const float inverse = fmaf(estimate, fmaf(-d, estimate, 1.0f), estimate);
  const float quotient = m * inverse;
  return fmaf(inverse, fmaf(-d, quotient, m), quotient);
}

}  // namespace adamw

// Returns the roots of the new second moments.
__device__ inline Numbers adamw_vector(const AdamWFactors& by, bool has_plain_factors,
                                       const Numbers& gradient, Numbers& weight, Numbers& first,
                                       Numbers& second) {
  using adamw::power_bits;
  Numbers m, v;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    m.of[k] = fmaf(gradient.of[k], by.to_first, first.of[k] * by.beta1);
    const float g = gradient.of[k] * by.to_second;
    v.of[k] = fmaf(g, g, second.of[k] * by.beta2);
  }
  constexpr uint32_t kLeastM = power_bits(-65);
  constexpr uint32_t kLeastV = power_bits(-80);
  Numbers roots;
  if (has_plain_factors && adamw::largest_above<kLeastM>(m) <= 2 * (power_bits(60) - kLeastM) &&
      adamw::largest_above<kLeastV>(v) <= 2 * (power_bits(60) - kLeastV)) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      roots.of[k] = adamw::exact_root(v.of[k]);
      const float change = adamw::exact_quotient(m.of[k], fmaf(roots.of[k], by.root, by.eps));
      weight.of[k] = fmaf(weight.of[k], by.decay, change);
    }
    first = m;
    second = v;
  } else {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      adamw_element(by, gradient.of[k], weight.of[k], first.of[k], second.of[k]);
      roots.of[k] = sqrtf(second.of[k]);
    }
  }
  return roots;
}

}  // namespace fsdp
