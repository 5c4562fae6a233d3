// The positions of a patch's elements as its files have them: ranges, or the numbers of elements
// between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

enum class PositionForm : uint8_t {
  kRanges,     // begin and end of each, int64
  kSkips,      // numbers of one byte
  kWideSkips,  // of two
};

// A skip is the number of elements that lie between an element and the one before it; the largest
// number of the width is no element, it skips that many.
template <typename Number>
constexpr int64_t largest_skip() {
  return std::numeric_limits<Number>::max();
}

// The positions that skips of `width` bytes lead to. Error that begins with `source` if a position
// is not below `numel`, or if their number is not `count`.
std::vector<int64_t> decode_skips(std::span<const std::byte> bytes, int64_t width, int64_t count,
                                  int64_t numel, const std::string& source);

}  // namespace fsdp
