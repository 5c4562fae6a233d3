#include "fsdp/base/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>

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
    // The distance is no less than the difference of the lengths.
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

// --- patterns over names -------------------------------------------------------------------------

bool matches_glob(std::string_view pattern, std::string_view text) {
  // Only the last star can have to take more text, so it is enough to come back to that one.
  size_t p = 0;
  size_t t = 0;
  size_t after_star = std::string_view::npos;
  size_t star_end = 0;  // the text that the star has taken ends here
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      after_star = ++p;
      star_end = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (after_star != std::string_view::npos) {
      p = after_star;
      t = ++star_end;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool matches_any_glob(std::span<const std::string> patterns, std::string_view text) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& each) { return matches_glob(each, text); });
}

namespace {

// How many characters of `text` must be changed, added or left out until the pattern describes it.
int64_t distance_to_glob(std::string_view pattern, std::string_view text) {
  // costs[t]: between what was read of the pattern and the first t characters of the text.
  std::vector<int64_t> costs(text.size() + 1);
  for (size_t t = 0; t <= text.size(); ++t) costs[t] = static_cast<int64_t>(t);
  for (const char wanted : pattern) {
    const std::vector<int64_t> before = costs;
    const bool is_star = wanted == '*';
    if (!is_star) costs[0] = before[0] + 1;
    for (size_t t = 1; t <= text.size(); ++t) {
      const bool equal = wanted == '?' || wanted == text[t - 1];
      costs[t] = is_star
                     ? std::min(before[t], costs[t - 1])
                     : std::min({before[t - 1] + (equal ? 0 : 1), before[t] + 1, costs[t - 1] + 1});
    }
  }
  return costs.back();
}

}  // namespace

std::string nearest_to_glob(std::string_view pattern, std::span<const std::string> candidates) {
  const auto num_letters = static_cast<int64_t>(
      std::count_if(pattern.begin(), pattern.end(), [](char c) { return c != '*' && c != '?'; }));
  int64_t best_distance = std::max<int64_t>(2, num_letters / 3) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    const int64_t distance = distance_to_glob(pattern, candidate);
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = candidate;
  }
  return best;
}

// --- text of others ------------------------------------------------------------------------------

namespace {

std::string escaped(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    char escape[8];
    std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned char>(byte));
    text += escape;
  }
  return text;
}

// Both sets of control characters: terminals obey both.
bool is_control(uint32_t code) { return code < 0x20 || (code >= 0x7F && code < 0xA0); }

}  // namespace

Utf8Character decode_utf8(std::string_view text) {
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

std::string shown(std::string_view text, size_t max_characters) {
  std::string result;
  while (!text.empty()) {
    const Utf8Character character = decode_utf8(text);
    const std::string_view bytes = text.substr(0, std::max<size_t>(character.num_bytes, 1));
    const bool is_shown = character.num_bytes > 0 && !is_control(character.code);
    const std::string next = is_shown ? std::string(bytes) : escaped(bytes);
    if (result.size() + next.size() > max_characters) return result + "...";
    result += next;
    text.remove_prefix(bytes.size());
  }
  return result;
}

std::string clean_utf8(std::string_view text) {
  std::string clean;
  while (!text.empty()) {
    const Utf8Character character = decode_utf8(text);
    const bool is_blank = character.code == '\n' || character.code == '\t';
    const bool is_kept = character.num_bytes > 0 && (is_blank || !is_control(character.code));
    clean += is_kept ? text.substr(0, character.num_bytes) : "\xef\xbf\xbd";
    text.remove_prefix(std::max<size_t>(character.num_bytes, 1));
  }
  return clean;
}

}  // namespace fsdp
