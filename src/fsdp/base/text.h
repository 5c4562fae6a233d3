// How values become words in messages, tables and logs.
#pragma once

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

// Whole numbers with thousands separators: "8,030,261,248".
std::string grouped_text(int64_t value);

// "1 tensor", "2,048 tensors".
std::string counted_text(int64_t count, std::string_view noun);

// The candidate with the smallest edit distance to `word`, or "" when none is near enough to be a
// likely typing error. For "did you mean".
std::string nearest(std::string_view word, std::span<const std::string> candidates);

}  // namespace fsdp
