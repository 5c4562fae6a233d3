// A flat range of an n-dimensional tensor, or of the slice that one rank of an ep group or of a tp
// group owns, as rectangular boxes: the form checkpoints speak.
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

// A tensor of two sections along dim 0, of 2 and of 4 rows, and the slice of rank 1 of 2: each
// section is cut into equal parts by itself.
//
//   whole  a A b b B B      the first section is a and A, the second one b and B
//   slice    A     B B
struct OwnedSlice {
  int64_t index = 0;  // this rank's
  int64_t count = 1;  // of so many; 1: the whole tensor
  int64_t dim = 0;
  std::vector<int64_t> sections = {};  // their sizes along the dim; each is a multiple of `count`

  bool is_whole() const { return count == 1; }
};

std::vector<int64_t> owned_shape(const OwnedSlice& slice, std::span<const int64_t> whole);
std::vector<int64_t> whole_shape(const OwnedSlice& slice, std::span<const int64_t> owned);

// The parts along the dim, one for each section: [begin, end) of the whole tensor. The slice has
// them one after the other.
std::vector<FlatRange> owned_parts(const OwnedSlice& slice);

// Elements as a box of the slice and as a box of the whole tensor.
struct OwnedBox {
  Box owned;
  Box whole;

  friend bool operator==(const OwnedBox&, const OwnedBox&) = default;
};

// A flat range of the slice is not one of the whole tensor; but both are boxes: at most 2n-1 for
// each section, in flat order of the boxes that the slice has.
std::vector<OwnedBox> owned_boxes(const OwnedSlice& slice, std::span<const int64_t> owned,
                                  FlatRange range);

}  // namespace fsdp
