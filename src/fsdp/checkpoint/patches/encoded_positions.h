// The positions of a patch's elements in the form that takes the fewest bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "fsdp/checkpoint/patches/patch_positions.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

struct EncodedPositions {
  PositionForm form = PositionForm::kRanges;
  at::Tensor numbers;  // on the CPU
};

// `positions` are int64, ascending, at least one. The work is done where they are, so that a device
// sends about a byte of each.
EncodedPositions encoded(const at::Tensor& positions);
EncodedPositions encoded(std::span<const FlatRange> ranges);

}  // namespace fsdp
