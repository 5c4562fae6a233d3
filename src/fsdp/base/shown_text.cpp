#include "fsdp/base/shown_text.h"

#include <cstdio>

namespace fsdp {

namespace {

// The character that `text` begins with; more than a byte where it is UTF-8.
std::string_view first_character(std::string_view text) {
  size_t bytes = 1;
  if (static_cast<unsigned char>(text[0]) >= 0xC0)
    while (bytes < text.size() && bytes < 4 && (text[bytes] & 0xC0) == 0x80) ++bytes;
  return text.substr(0, bytes);
}

// Terminals obey both sets, U+0000 to U+001F and U+0080 to U+009F; bytes that are no UTF-8 count.
bool is_control(std::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first >= 0x7F;
  return first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
}

std::string escaped(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(byte));
    text += escape;
  }
  return text;
}

}  // namespace

std::string shown(std::string_view text, size_t max_characters) {
  std::string result;
  while (!text.empty()) {
    const std::string_view character = first_character(text);
    const std::string next = is_control(character) ? escaped(character) : std::string(character);
    if (result.size() + next.size() > max_characters) return result + "...";
    result += next;
    text.remove_prefix(character.size());
  }
  return result;
}

}  // namespace fsdp
