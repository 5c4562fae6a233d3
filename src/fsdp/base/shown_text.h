// Text that came from a file or another process, as messages show it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp {

// At most that many characters, then "..."; control characters as "\x1b". Whoever wrote the text
// chose its length and bytes, and must not write to a terminal or fill a log.
std::string shown(std::string_view text, size_t max_characters = 120);

}  // namespace fsdp
