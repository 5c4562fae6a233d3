// Segments for tensors whose bricks have different sizes: shares stay equal, no brick is split.
#pragma once

#include <cstdint>
#include <span>

#include "fsdp/layout/brick.h"

namespace fsdp {

// A gather is one coalesced launch over all segments, but each adds a little to it.
inline constexpr size_t kMaxRowSegments = 8;

// Tensors with bricks of one size form a class. Classes are taken from the largest brick to the
// smallest; each joins an existing segment when that costs no more than a segment of its own, and
// else gets one. Tensors of one brick and tensors that may be cut anywhere come last and fill gaps.
Packing pack_rows(std::span<const BrickedTensor> tensors, int64_t num_tensors, int64_t align_numel,
                  int64_t num_shares);

}  // namespace fsdp
