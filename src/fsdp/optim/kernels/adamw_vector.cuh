// AdamW on four elements at once on a device: the bits of adamw_element with fewer instructions.
#pragma once

#include "fsdp/base/narrow_vector.cuh"
#include "fsdp/optim/kernels/update_math.h"

namespace fsdp {

// Note [Roots and quotients]
// A device's exact root and quotient are an estimate, a few fused operations, and a branch to
// slower code for very large or small numbers. Four elements have eight such branches, one after
// the other. Here one test afterwards replaces all of them: if every number is in a range in which
// the estimates become exact, the results stand; otherwise the four elements are computed again,
// one by one.
//
// With a root in [2^-49, 2^15], its factor in [2^-20, 2^30] and that of eps up to 2^45, the
// denominator is in [2^-69, 2^46]; with m in [2^-75, 2^30] the quotient and its remainder are
// normal numbers, and the last fused operation rounds correctly. Roots of numbers outside [2^-98,
// 2^30] are outside the range, too, or NaN.

// Whether the factors allow the short way, the same for all elements.
__device__ inline bool are_plain(const AdamWFactors& by) {
  return by.root <= -0x1p-20f && by.root >= -0x1p30f && by.eps <= 0.0f && by.eps >= -0x1p45f;
}

namespace adamw {

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

struct AdamWVector {
  Numbers weight;
  Measured first;
  Numbers second;
  Measured roots;  // of the second moments
};

__device__ inline AdamWVector adamw_vector(const AdamWFactors& by, bool has_plain_factors,
                                           const Numbers& gradient, const Numbers& weight,
                                           const Numbers& first, const Numbers& second) {
  const Numbers m = each([&](int k) { return adamw_first(by, gradient.of[k], first.of[k]); });
  const Numbers v = each([&](int k) { return adamw_second(by, gradient.of[k], second.of[k]); });
  const Numbers roots = each([&](int k) { return adamw::exact_root(v.of[k]); });
  const Numbers updated = each([&](int k) {
    const float denominator = fmaf(roots.of[k], by.root, by.eps);
    return fmaf(weight.of[k], by.decay, adamw::exact_quotient(m.of[k], denominator));
  });
  AdamWVector result{updated, measured(m), v, measured(roots)};
  const bool is_exact = has_plain_factors && result.first.least >= 0x1p-75f &&
                        result.first.largest <= 0x1p30f && result.roots.least >= 0x1p-49f &&
                        result.roots.largest <= 0x1p15f;
  if (!is_exact) {
    result.roots = measured(each([&](int k) { return sqrtf(v.of[k]); }));
    result.weight = each(
        [&](int k) { return adamw_weight(by, m.of[k], result.roots.numbers.of[k], weight.of[k]); });
  }
  return result;
}

}  // namespace fsdp
