// A flat range of an n-dimensional tensor as rectangular boxes, the form checkpoints speak.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/segment.h"

namespace fsdp {

// One offset and one size per dim. A box made by boxes() is contiguous in the flat tensor.
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  int64_t numel() const;

  friend bool operator==(const Box&, const Box&) = default;
};

// The boxes that together are exactly `range` of a row-major tensor, in flat order: at most 2n-1
// for n dims. A 0-D tensor has one box without dims; an empty range has none.
std::vector<Box> boxes(std::span<const int64_t> shape, FlatRange range);

}  // namespace fsdp
