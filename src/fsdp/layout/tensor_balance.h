// Whole tensors spread over ranks so that no rank holds much more than the others.
#pragma once

#include <span>

#include "fsdp/layout/brick.h"
#include "fsdp/layout/strategy.h"

namespace fsdp {

// One segment with uneven shares. Tensors go, largest first, to the inner rank with the least so
// far, and those of an inner rank likewise to its outer ranks; so the largest inner shard is at
// most 4/3 of the best possible (Graham 1969). Within a share tensors keep the order of the
// request. `held_load`, by share, is what the ranks hold of other groups; empty for nothing.
Packing balance_tensors(std::span<const BrickedTensor> tensors, int64_t num_tensors, MeshShape mesh,
                        std::span<const int64_t> held_load);

}  // namespace fsdp
