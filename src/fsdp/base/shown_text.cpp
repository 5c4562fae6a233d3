#include "fsdp/base/shown_text.h"

#include <cstdio>

namespace fsdp {

std::string shown(std::string_view text) {
  constexpr size_t kMaxChars = 120;
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    size_t end = i + 1;
    // A character of several bytes stays whole.
    if (byte >= 0xC0)
      while (end < text.size() && end < i + 4 && (text[end] & 0xC0) == 0x80) ++end;
    std::string next(text.substr(i, end - i));
    if (byte < 0x20 || byte == 0x7F) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02x", byte);
      next = escape;
    }
    if (result.size() + next.size() > kMaxChars) return result + "...";
    result += next;
    i = end;
  }
  return result;
}

}  // namespace fsdp
