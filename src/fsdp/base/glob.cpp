#include "fsdp/base/glob.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace fsdp {

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

}  // namespace fsdp
