// AdamW with fp32 moments where roots and divisions are what an update waits for (aarch64): some of
// the quotients come from multiplications instead, and the moments of one group of vectors are
// updated beside the weights of the group before. The same bits as adamw_element.
#pragma once

#if defined(__aarch64__)

#include <cstdint>

#include "fsdp/optim/adamw_math.h"
#include "fsdp/optim/update_span.h"

namespace fsdp::overlapped {

// Updates elements from `begin` on and returns how many: none where a type or a factor is not for
// this loop, and not the last few.
int64_t update(const AdamWFactors& by, const UpdateSpan& span, int64_t begin, int64_t numel);

}  // namespace fsdp::overlapped

#endif  // __aarch64__
