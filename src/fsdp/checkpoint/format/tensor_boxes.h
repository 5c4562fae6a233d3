// Boxes of tensors: the sections that a model tensor is stored as, and boxes inside larger memory
// or files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/layout/box.h"

namespace fsdp {

// --- sections ------------------------------------------------------------------------------------

// The sections of a model tensor, and the part of each section that a piece of the tensor covers.
//
// A model may fuse tensors that others keep apart, for example the gate and the up projection of a
// gated MLP. Stored apart, under names of their own, both can be loaded by either model:
//
//   model: linear_fc1.weight [4, 3]        stored: two sections [2, 3], at [0, 0] and [2, 0]
//
//     a a a                                  a a a   linear_fc1.weight_w
//     a a B  <- a rank's piece begins        a a B
//     B B B  <- and ends here                B B B   linear_fc1.weight_v
//     c c c                                  c c c
//
// Moments have the sections of their parameter; their names are the section's plus ".exp_avg", ...

struct TensorSection {
  std::string name;              // in the files
  std::vector<int64_t> shape;    // in the files
  std::vector<int64_t> offsets;  // of its first element in the model tensor, one per dim

  friend bool operator==(const TensorSection&, const TensorSection&) = default;
};

// The common part of a section and a box of the model tensor, in the coordinates of each.
struct SectionBox {
  size_t section = 0;  // its position in the list
  Box stored;
  Box model;

  friend bool operator==(const SectionBox&, const SectionBox&) = default;
};

// The parts of a box of the model tensor, in the order of the sections: together exactly the box.
// Leaves out sections that share nothing with it. A part of a contiguous box is contiguous in the
// model tensor only if sections are cut along dim 0.
std::vector<SectionBox> cut_at_sections(std::span<const TensorSection> sections,
                                        const Box& model_box);

// Where the first element of a part of `box` lies in the flattened slice, whose strides are given.
int64_t place_of(const SectionBox& part, const OwnedBox& box, std::span<const int64_t> strides);

// --- boxes in memory and files -------------------------------------------------------------------

// A box and its place: element [i, j, ...] lies `begin + i * strides[0] + j * strides[1] + ...`
// elements into some memory or file.
struct StridedBox {
  Box box;  // in the tensor
  std::vector<int64_t> strides;
  int64_t begin = 0;

  friend bool operator==(const StridedBox&, const StridedBox&) = default;
};

// Row-major: the last stride is 1.
std::vector<int64_t> strides_of(std::span<const int64_t> shape);

// A box that is stored alone, beginning at element `begin`.
StridedBox packed(const Box& box, int64_t begin);

// A whole tensor whose element `first`, counted row by row, is the first of the memory.
StridedBox flattened(std::span<const int64_t> shape, int64_t first);

// The part of `whole` that lies in `box` of the same tensor; it may be empty.
StridedBox part_of(const StridedBox& whole, const Box& box);

// The common part of two boxes of one tensor; it may be empty.
Box intersect(const Box& a, const Box& b);

// Elements [from, from + numel) of one memory go to [to, to + numel) of the other.
struct Run {
  int64_t from = 0;
  int64_t to = 0;
  int64_t numel = 0;

  friend bool operator==(const Run&, const Run&) = default;
};

// The copies that move the common part of two boxes: as few as possible, in the tensor's order.
std::vector<Run> runs(const StridedBox& from, const StridedBox& to);

}  // namespace fsdp
