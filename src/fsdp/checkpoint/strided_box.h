// A box of a tensor in memory that holds more than the box, and the runs that move one into
// another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/box.h"

namespace fsdp {

// Where a box lies: element [i, j, ...] of it is `begin + i * strides[0] + j * strides[1] + ...`
// elements into some memory or file.
struct StridedBox {
  Box box;  // in the tensor
  std::vector<int64_t> strides;
  int64_t begin = 0;

  friend bool operator==(const StridedBox&, const StridedBox&) = default;
};

// Row-major: the last is 1.
std::vector<int64_t> strides_of(std::span<const int64_t> shape);

// A box that is stored alone, from element `begin` on.
StridedBox packed(const Box& box, int64_t begin);

// The part of it that lies in `box` of the same tensor; without elements where nothing does.
StridedBox part_of(const StridedBox& whole, const Box& box);

// What two boxes of one tensor share; has no elements where nothing is.
Box intersect(const Box& a, const Box& b);

// Elements [from, from + numel) of one memory become [to, to + numel) of the other.
struct Run {
  int64_t from = 0;
  int64_t to = 0;
  int64_t numel = 0;

  friend bool operator==(const Run&, const Run&) = default;
};

// Moves what both have of the tensor; as few runs as possible, in the order of the tensor.
std::vector<Run> runs(const StridedBox& from, const StridedBox& to);

}  // namespace fsdp
