// Characters of UTF-8 text, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fsdp {

struct Utf8Character {
  uint32_t code = 0;
  size_t num_bytes = 0;  // 0: not valid, or cut short
};

// The character at the beginning of `text`, which is not empty.
Utf8Character decode_utf8(std::string_view text);

}  // namespace fsdp
