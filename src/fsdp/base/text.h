// How values become words in messages, tables and logs; patterns over names; text of others, which
// is UTF-8 at best.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// concat("rank ", 3, " of ", 8) == "rank 3 of 8"
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  static_cast<void>((out << ... << parts));
  return out.str();
}

// "[4096, 1024]"
std::string list_text(std::span<const int64_t> values);

// Joins with a separator: "a, b, c".
std::string join(std::span<const std::string> parts, std::string_view separator);

// "3829 MiB", "207.9 MiB", "512 B": powers of two and up to four digits, as allocators and the
// drivers' tools report memory.
std::string bytes_text(double bytes);
template <std::integral Bytes>
std::string bytes_text(Bytes bytes) {
  return bytes_text(static_cast<double>(bytes));
}

// Whole numbers with thousands separators: "8,030,261,248".
std::string grouped_text(int64_t value);

// "1 tensor", "2,048 tensors".
std::string counted_text(int64_t count, std::string_view noun);

// The candidate with the smallest edit distance to `word`, or "" when none is near enough to be a
// likely typing error. For "did you mean".
std::string nearest(std::string_view word, std::span<const std::string> candidates);

// --- patterns over names -------------------------------------------------------------------------

// In patterns `*` is any text, also none and also over dots, `?` is one character.
// Whether the pattern describes the whole of `text`.
bool matches_glob(std::string_view pattern, std::string_view text);
bool matches_any_glob(std::span<const std::string> patterns, std::string_view text);

// The candidate that is nearest to a pattern, or "" when none is near enough to be what was meant.
std::string nearest_to_glob(std::string_view pattern, std::span<const std::string> candidates);

// --- text of others ------------------------------------------------------------------------------

struct Utf8Character {
  uint32_t code = 0;
  size_t num_bytes = 0;  // 0: not valid, or cut short
};

// The character at the beginning of `text`, which is not empty.
Utf8Character decode_utf8(std::string_view text);

// Foreign text as messages show it: at most that many characters, then "..."; control characters as
// "\x1b". The author of the text chose its length and bytes, which must neither control a terminal
// nor fill a log.
std::string shown(std::string_view text, size_t max_characters = 120);

// Valid UTF-8 without control characters other than tabs and line breaks, so that no text moves a
// terminal's cursor. Everything else becomes U+FFFD, the replacement character.
std::string clean_utf8(std::string_view text);

}  // namespace fsdp
