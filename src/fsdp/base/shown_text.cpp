#include "fsdp/base/shown_text.h"

#include <algorithm>
#include <cstdio>

#include "fsdp/base/utf8.h"

namespace fsdp {

namespace {

// Terminals obey both sets.
bool is_control(uint32_t code) { return code < 0x20 || (code >= 0x7F && code < 0xA0); }

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
    const Utf8Character character = decode_utf8(text);
    const std::string_view bytes = text.substr(0, std::max<size_t>(character.num_bytes, 1));
    const bool is_shown = character.num_bytes > 0 && !is_control(character.code);
    const std::string next = is_shown ? std::string(bytes) : escaped(bytes);
    if (result.size() + next.size() > max_characters) return result + "...";
    result += next;
    text.remove_prefix(bytes.size());
  }
  return result;
}

}  // namespace fsdp
