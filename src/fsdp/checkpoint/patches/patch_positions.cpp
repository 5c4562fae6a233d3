#include "fsdp/checkpoint/patches/patch_positions.h"

#include <cstring>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

template <typename Number>
void decode(std::span<const std::byte> bytes, int64_t numel, const std::string& source,
            std::vector<int64_t>& positions) {
  int64_t next = 0;
  for (size_t i = 0; i < bytes.size(); i += sizeof(Number)) {
    Number number = 0;
    std::memcpy(&number, bytes.data() + i, sizeof(number));
    next += number;
    if (number == largest_skip<Number>()) continue;
    FSDP_CHECK(next < numel, source, ": element ", next, " is beyond the tensor's last one, ",
               numel - 1, "; the patch is damaged, so fetch it again");
    positions.push_back(next++);
  }
}

}  // namespace

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

}  // namespace fsdp
