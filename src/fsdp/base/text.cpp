#include "fsdp/base/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace fsdp {

std::string list_text(std::span<const int64_t> values) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < values.size(); ++i) out << (i == 0 ? "" : ", ") << values[i];
  out << "]";
  return out.str();
}

std::string join(std::span<const std::string> parts, std::string_view separator) {
  std::ostringstream out;
  for (size_t i = 0; i < parts.size(); ++i) out << (i == 0 ? "" : separator) << parts[i];
  return out.str();
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  // Up to 9999 of a unit, so that figures such as 3829 MiB keep the digits people compare.
  while (std::abs(bytes) >= 10000.0 && unit + 1 < kUnits.size()) {
    bytes /= 1024.0;
    ++unit;
  }
  const bool whole = unit == 0 || std::abs(bytes) >= 1000.0;
  std::array<char, 32> buffer{};
  std::snprintf(buffer.data(), buffer.size(), whole ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return buffer.data();
}

std::string grouped_text(int64_t value) {
  const std::string digits = std::to_string(value);
  const size_t first_digit = value < 0 ? 1 : 0;
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > first_digit && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

std::string counted_text(int64_t count, std::string_view noun) {
  return concat(grouped_text(count), " ", noun, count == 1 ? "" : "s");
}

namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(std::string_view word, std::span<const std::string> candidates) {
  // "fp8" is the beginning of a longer name rather than a misspelt short one.
  if (word.size() >= 2)
    for (const std::string& candidate : candidates)
      if (candidate.starts_with(word)) return candidate;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    // Of lengths that differ by so much, the distance is no less.
    if (std::max(word.size(), candidate.size()) - std::min(word.size(), candidate.size()) >=
        best_distance)
      continue;
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace fsdp
