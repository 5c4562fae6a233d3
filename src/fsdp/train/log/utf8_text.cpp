#include "fsdp/train/log/utf8_text.h"

#include <cstdint>

#include "fsdp/base/utf8.h"

namespace fsdp::train {

namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

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
    const Utf8Character next = decode_utf8(text);
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
