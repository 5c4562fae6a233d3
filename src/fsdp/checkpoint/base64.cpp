#include "fsdp/checkpoint/base64.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace fsdp {

namespace {

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string base64(std::string_view bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t length = std::min<size_t>(3, bytes.size() - i);
    uint32_t three = 0;
    for (size_t k = 0; k < 3; ++k)
      three = three << 8 | (k < length ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    for (size_t k = 0; k < 4; ++k)
      text.push_back(k <= length ? kDigits[three >> (18 - 6 * k) & 63] : '=');
  }
  return text;
}

std::optional<std::string> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 4) {
    const std::string_view four = text.substr(i, 4);
    const size_t length = std::min(four.find('='), four.size());
    const bool is_last = i + 4 == text.size();
    if (length < (is_last ? 2U : 4U)) return std::nullopt;
    uint32_t value = 0;
    for (size_t k = 0; k < 4; ++k) {
      const size_t digit = k < length ? kDigits.find(four[k]) : (four[k] == '=' ? 0 : 64);
      if (digit >= 64) return std::nullopt;
      value = value << 6 | static_cast<uint32_t>(digit);
    }
    for (size_t k = 0; k + 1 < length; ++k)
      bytes.push_back(static_cast<char>(value >> (16 - 8 * k) & 0xFF));
    // Bits that no byte uses must be 0, so that there is one text for each value.
    if ((value & ((1U << (8 * (4 - length))) - 1U)) != 0) return std::nullopt;
  }
  return bytes;
}

}  // namespace fsdp
