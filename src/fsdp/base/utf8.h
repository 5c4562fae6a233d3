// UTF-8 text that came from a file or another process: its characters, and how messages show it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp {

struct Utf8Character {
  uint32_t code = 0;
  size_t num_bytes = 0;  // 0: not valid, or cut short
};

// The character at the beginning of `text`, which is not empty.
Utf8Character decode_utf8(std::string_view text);

// Foreign text as messages show it: at most that many characters, then "..."; control characters as
// "\x1b". The author of the text chose its length and bytes, which must neither control a terminal
// nor fill a log.
std::string shown(std::string_view text, size_t max_characters = 120);

}  // namespace fsdp
