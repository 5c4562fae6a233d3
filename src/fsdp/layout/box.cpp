#include "fsdp/layout/box.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

// strides[d] = elements per index of dim d.
std::vector<int64_t> strides_of(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = checked_mul(strides[d], shape[d]);
  return strides;
}

// `count` indices of dim d from flat position `begin`, which is a multiple of strides[d]: one index
// in every dim before d, everything in the dims after it.
Box box_along(std::span<const int64_t> shape, std::span<const int64_t> strides, size_t d,
              int64_t begin, int64_t count) {
  Box box{.offsets = std::vector<int64_t>(shape.size(), 0),
          .sizes = std::vector<int64_t>(shape.begin(), shape.end())};
  for (size_t dim = 0; dim <= d; ++dim) {
    box.offsets[dim] = begin / strides[dim];
    box.sizes[dim] = dim < d ? 1 : count;
    begin %= strides[dim];
  }
  return box;
}

}  // namespace

int64_t Box::numel() const {
  // With a dim of 0 the other dims may be anything, and their product may overflow.
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return 0;
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

std::vector<Box> boxes(std::span<const int64_t> shape, FlatRange range) {
  int64_t tensor_numel = 1;
  for (const int64_t size : shape) tensor_numel = checked_mul(tensor_numel, size);
  FSDP_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= tensor_numel, "range [",
             range.begin, ", ", range.end, ") is not inside the ", tensor_numel,
             " elements of shape ", list_text(shape), "; give a range in tensor coordinates");
  if (range.empty()) return {};
  if (shape.empty()) return {Box{}};

  const std::vector<int64_t> strides = strides_of(shape);
  std::vector<Box> result;
  int64_t at = range.begin;
  // Up: complete the open row, then the open plane, ... as long as the range reaches their ends.
  for (size_t d = shape.size(); d-- > 1;) {
    const int64_t next = round_up(at, strides[d - 1]);
    if (next > range.end) break;
    if (next > at) result.push_back(box_along(shape, strides, d, at, (next - at) / strides[d]));
    at = next;
  }
  // Down: whole indices of the outermost dim that still fits, then of the next inner one, ...
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t count = (range.end - at) / strides[d];
    if (count > 0) result.push_back(box_along(shape, strides, d, at, count));
    at += count * strides[d];
  }
  return result;
}

}  // namespace fsdp
