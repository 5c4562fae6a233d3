#include "fsdp/layout/owned_slice.h"

#include <algorithm>

#include "fsdp/base/check.h"

namespace fsdp {

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
