#include "fsdp/checkpoint/manifest_checksum.h"

#include <algorithm>
#include <span>

#include "fsdp/base/crc32c.h"
#include "fsdp/base/error.h"

namespace fsdp {

namespace {

constexpr std::string_view kEnd = "\n}\n";
// Line breaks in strings are escaped, and fields of inner objects are indented further.
constexpr std::string_view kField = ",\n \"crc32c\": ";

// All but the checksum and the end.
std::string_view body_of(std::string_view text) {
  return text.substr(0, std::min(text.rfind(kField), text.size() - kEnd.size()));
}

std::string end_of(std::string_view body) {
  const uint32_t checksum =
      crc32c(std::as_bytes(std::span(kEnd)), crc32c(std::as_bytes(std::span(body))));
  return concat(kField, checksum, kEnd);
}

}  // namespace

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
