// AdamW with fp32 moments where roots and divisions are what an update waits for (aarch64): some of
// the quotients come from multiplications instead, and the moments of one group of vectors are
// updated beside the weights of the group before. The same bits as adamw_element.
#pragma once

#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstdint>

#include "fsdp/optim/adamw_math.h"
#include "fsdp/optim/update_span.h"

namespace fsdp::overlapped {

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

// Constants that operations overwrite. They are loaded each time: a copy of a register would take a
// vector unit's time.
struct LoadedConstants {
  volatile float32x4_t eps;
  volatile float32x4_t one;
};

// Updates elements from `begin` on and returns how many: none where a type or a factor is not for
// this loop, and not the last few.
int64_t update(const AdamWFactors& by, const UpdateSpan& span, int64_t begin, int64_t numel);

}  // namespace fsdp::overlapped

#endif  // __aarch64__
