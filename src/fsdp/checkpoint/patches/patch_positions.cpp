#include "fsdp/checkpoint/patches/patch_positions.h"

#include <cstring>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

// Numbers that gaps take if `largest` is the largest number of their width.
int64_t num_skips(std::span<const int64_t> positions, int64_t largest) {
  int64_t count = 0;
  int64_t next = 0;
  for (const int64_t position : positions) {
    count += (position - next) / largest + 1;
    next = position + 1;
  }
  return count;
}

template <typename Number>
constexpr int64_t kLargest = static_cast<int64_t>(static_cast<Number>(-1));

template <typename Number>
std::vector<std::byte> encoded(std::span<const int64_t> positions, int64_t count) {
  std::vector<std::byte> bytes(static_cast<size_t>(count) * sizeof(Number));
  std::byte* into = bytes.data();
  const auto append = [&](int64_t value) {
    const auto number = static_cast<Number>(value);
    std::memcpy(into, &number, sizeof(number));
    into += sizeof(number);
  };
  int64_t next = 0;
  for (const int64_t position : positions) {
    for (; position - next >= kLargest<Number>; next += kLargest<Number>) append(kLargest<Number>);
    append(position - next);
    next = position + 1;
  }
  return bytes;
}

template <typename Number>
void decode(std::span<const std::byte> bytes, int64_t numel, const std::string& source,
            std::vector<int64_t>& positions) {
  int64_t next = 0;
  for (size_t i = 0; i < bytes.size(); i += sizeof(Number)) {
    Number number = 0;
    std::memcpy(&number, bytes.data() + i, sizeof(number));
    next += number;
    if (number == kLargest<Number>) continue;
    FSDP_CHECK(next < numel, source, ": element ", next, " is beyond the tensor's last one, ",
               numel - 1, "; the patch is damaged, so fetch it again");
    positions.push_back(next++);
  }
}

}  // namespace

Skips encode_skips(std::span<const int64_t> positions) {
  const int64_t narrow = num_skips(positions, kLargest<uint8_t>);
  const int64_t wide = num_skips(positions, kLargest<uint16_t>);
  if (narrow <= 2 * wide) return {1, encoded<uint8_t>(positions, narrow)};
  return {2, encoded<uint16_t>(positions, wide)};
}

std::vector<int64_t> decode_skips(std::span<const std::byte> bytes, int64_t width, int64_t count,
                                  int64_t numel, const std::string& source) {
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(count));
  width == 1 ? decode<uint8_t>(bytes, numel, source, positions)
             : decode<uint16_t>(bytes, numel, source, positions);
  FSDP_CHECK(static_cast<int64_t>(positions.size()) == count, source, ": has ", positions.size(),
             " positions and ", count, " values; the patch is damaged, so fetch it again");
  return positions;
}

std::vector<FlatRange> as_ranges(std::span<const int64_t> positions, size_t most) {
  std::vector<FlatRange> ranges;
  for (const int64_t position : positions) {
    if (!ranges.empty() && ranges.back().end == position) {
      ++ranges.back().end;
    } else if (ranges.size() == most) {
      return {};
    } else {
      ranges.push_back({position, position + 1});
    }
  }
  return ranges;
}

}  // namespace fsdp
