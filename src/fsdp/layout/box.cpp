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

std::vector<int64_t> owned_shape(const OwnedSlice& slice, std::span<const int64_t> whole) {
  std::vector<int64_t> shape(whole.begin(), whole.end());
  if (!slice.is_whole()) shape[static_cast<size_t>(slice.dim)] /= slice.count;
  return shape;
}

std::vector<int64_t> whole_shape(const OwnedSlice& slice, std::span<const int64_t> owned) {
  std::vector<int64_t> shape(owned.begin(), owned.end());
  if (!slice.is_whole()) shape[static_cast<size_t>(slice.dim)] *= slice.count;
  return shape;
}

std::vector<FlatRange> owned_parts(const OwnedSlice& slice) {
  std::vector<FlatRange> parts;
  int64_t section_begin = 0;
  for (const int64_t section : slice.sections) {
    const int64_t part = section / slice.count;
    const int64_t begin = section_begin + slice.index * part;
    parts.push_back({begin, begin + part});
    section_begin += section;
  }
  return parts;
}

std::vector<OwnedBox> owned_boxes(const OwnedSlice& slice, std::span<const int64_t> owned,
                                  FlatRange range) {
  std::vector<OwnedBox> all;
  const std::vector<FlatRange> parts = owned_parts(slice);
  const auto dim = static_cast<size_t>(slice.dim);
  for (const Box& box : boxes(owned, range)) {
    if (slice.is_whole()) {
      all.push_back({box, box});
      continue;
    }
    int64_t part_begin = 0;  // in the slice
    for (const FlatRange& part : parts) {
      const int64_t begin = std::max(box.offsets[dim], part_begin);
      const int64_t end = std::min(box.offsets[dim] + box.sizes[dim], part_begin + part.numel());
      if (begin < end) {
        OwnedBox& both = all.emplace_back(OwnedBox{box, box});
        both.owned.offsets[dim] = begin;
        both.owned.sizes[dim] = both.whole.sizes[dim] = end - begin;
        both.whole.offsets[dim] = part.begin + begin - part_begin;
      }
      part_begin += part.numel();
    }
    FSDP_ASSERT(part_begin == owned[dim], part_begin, " of ", owned[dim], " along dim ", dim);
  }
  return all;
}

}  // namespace fsdp
