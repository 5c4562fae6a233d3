#include "fsdp/train/utf8_text.h"

#include <cstdint>

namespace fsdp::train {

namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

struct Decoded {
  uint32_t code = 0;
  size_t num_bytes = 0;  // 0: not valid
};

// The character at the beginning of `text`, which is not empty.
Decoded decode(std::string_view text) {
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

bool is_shown(uint32_t code) {
  const bool is_control = code < 0x20 || (code >= 0x7f && code < 0xa0);
  return code == '\n' || code == '\t' || !is_control;
}

std::string_view entity_of(char c) {
  switch (c) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    default:
      return {};
  }
}

}  // namespace

std::string clean_utf8(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const Decoded next = decode(text);
    if (next.num_bytes > 0 && is_shown(next.code))
      clean += text.substr(0, next.num_bytes);
    else
      clean += kReplacement;
    text.remove_prefix(next.num_bytes > 0 ? next.num_bytes : 1);
  }
  return clean;
}

std::string html_text(std::string_view text) {
  std::string html;
  html.reserve(text.size());
  for (const char c : clean_utf8(text)) {
    const std::string_view entity = entity_of(c);
    if (entity.empty())
      html += c;
    else
      html += entity;
  }
  return html;
}

}  // namespace fsdp::train
