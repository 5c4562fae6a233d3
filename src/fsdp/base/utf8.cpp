#include "fsdp/base/utf8.h"

#include <algorithm>
#include <cstdio>

namespace fsdp {

namespace {

// Both sets of control characters: terminals obey both.
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

Utf8Character decode_utf8(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return {first, 1};
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return {};
  uint32_t code = first & (0xffu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next & 0xc0) != 0x80) return {};
    code = code << 6 | (next & 0x3f);
  }
  const bool is_too_long = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  if (is_too_long || is_surrogate || code > 0x10ffff) return {};
  return {code, length};
}

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
