// The checksum a manifest carries, its last field: the one file that no other file vouches for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp {

enum class ManifestChecksum : uint8_t { kAbsent, kRight, kWrong };

// `text` is a JSON object that ends with "\n}\n", as manifests do. Adds the field "crc32c", the
// CRC32C of `text`; one that is there already is replaced.
std::string with_checksum(std::string_view text);

// Bytes are compared, not values: a text with other white space is not the one that was written.
ManifestChecksum checksum_in(std::string_view text);

}  // namespace fsdp
