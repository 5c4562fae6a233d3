// The parts of a manifest's text besides its fields: bytes as base64, paths that may be opened, and
// the checksum at its end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp {

// --- bytes as text -------------------------------------------------------------------------------

std::string base64(std::string_view bytes);

// nullopt for a text that base64() does not write.
std::optional<std::string> from_base64(std::string_view text);

// --- paths that may be opened --------------------------------------------------------------------

// "model/00000-0.safetensors": leads from a directory to something below it, in one spelling only.
// No "..", ".", doubled or trailing "/", absolute path, backslash or control character.
bool is_plain_path(std::string_view path);

// One part of such a path.
bool is_plain_name(std::string_view name);

// --- the checksum at the end ---------------------------------------------------------------------

enum class ManifestChecksum : uint8_t { kAbsent, kRight, kWrong };

// `text` is a JSON object that ends with "\n}\n", as manifests do. Adds the field "crc32c", the
// CRC32C of `text`, in place of an older one.
std::string with_checksum(std::string_view text);

// Compares bytes, not values: a text with other white space does not match.
ManifestChecksum checksum_in(std::string_view text);

}  // namespace fsdp
