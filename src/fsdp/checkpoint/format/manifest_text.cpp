#include "fsdp/checkpoint/format/manifest_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"

namespace fsdp {

namespace {

constexpr std::string_view kDigits =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::string_view kEnd = "\n}\n";
// Unique: line breaks in strings are escaped, and fields of inner objects are indented further.
constexpr std::string_view kField = ",\n \"crc32c\": ";

// Everything except the checksum and the end.
std::string_view body_of(std::string_view text) {
  return text.substr(0, std::min(text.rfind(kField), text.size() - kEnd.size()));
}

std::string end_of(std::string_view body) {
  const uint32_t checksum =
      crc32c(std::as_bytes(std::span(kEnd)), crc32c(std::as_bytes(std::span(body))));
  return concat(kField, checksum, kEnd);
}

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
    // Unused bits must be 0, so that each value has one text.
    if ((value & ((1U << (8 * (4 - length))) - 1U)) != 0) return std::nullopt;
  }
  return bytes;
}

bool is_plain_name(std::string_view name) {
  if (name.empty() || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F && c != '\\' && c != '/';
  });
}

bool is_plain_path(std::string_view path) {
  for (;;) {
    const size_t end = path.find('/');
    if (!is_plain_name(path.substr(0, end))) return false;
    if (end == std::string_view::npos) return true;
    path.remove_prefix(end + 1);
  }
}

std::string with_checksum(std::string_view text) {
  FSDP_ASSERT(text.ends_with(kEnd), "a manifest ends otherwise");
  const std::string_view body = body_of(text);
  return std::string(body) + end_of(body);
}

ManifestChecksum checksum_in(std::string_view text) {
  if (text.find(kField) == std::string_view::npos) return ManifestChecksum::kAbsent;
  const std::string_view body = body_of(text);
  return text.substr(body.size()) == end_of(body) ? ManifestChecksum::kRight
                                                  : ManifestChecksum::kWrong;
}

}  // namespace fsdp
