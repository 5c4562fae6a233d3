// The positions of a patch's elements: ranges, or the numbers of elements between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/layout/segment.h"

namespace fsdp {

// The gaps between ascending positions. A gap is the number of elements that lie between an element
// and the one before it; the largest number of the width is no element, it skips that many.
struct Skips {
  int64_t width = 1;  // bytes of a number: 1 or 2, whichever takes fewer bytes in all
  std::vector<std::byte> bytes;

  int64_t count() const { return static_cast<int64_t>(bytes.size()) / width; }
};

Skips encode_skips(std::span<const int64_t> positions);

// The inverse. Error that begins with `source` if a position is not below `numel`, or if their
// number is not `count`.
std::vector<int64_t> decode_skips(std::span<const std::byte> bytes, int64_t width, int64_t count,
                                  int64_t numel, const std::string& source);

// Neighbouring positions as ranges, up to `most` of them; an empty list if there are more.
std::vector<FlatRange> as_ranges(std::span<const int64_t> positions, size_t most);

}  // namespace fsdp
