// Few combinations of many properties, in which any two values of two properties meet: defects that
// need one or two properties show up in them.
#pragma once

#include <array>
#include <cstddef>
#include <set>
#include <vector>

namespace fsdp::testing {

// Chooses among `num_values[i]` values of property i; the same every time.
template <size_t kNumProperties>
class Pairwise {
 public:
  using Choice = std::array<size_t, kNumProperties>;  // an index for every property

  explicit Pairwise(const Choice& num_values) : num_values_(num_values) {}

  std::vector<Choice> choices() const {
    std::set<ValuePair> missing;
    for (size_t a = 0; a < kNumProperties; ++a)
      for (size_t b = a + 1; b < kNumProperties; ++b)
        for (size_t i = 0; i < num_values_[a]; ++i)
          for (size_t j = 0; j < num_values_[b]; ++j) missing.insert({a, i, b, j});
    std::vector<Choice> chosen;
    while (!missing.empty()) {
      // Starts with a missing pair, so that every choice adds at least one.
      const ValuePair pair = *missing.begin();
      Choice start{};
      start[pair[0]] = pair[1];
      start[pair[2]] = pair[3];
      chosen.push_back(improved(start, missing));
      for_each_pair(chosen.back(), [&](const ValuePair& covered) { missing.erase(covered); });
    }
    return chosen;
  }

 private:
  using ValuePair = std::array<size_t, 4>;  // property, value, later property, its value

  template <typename Visit>
  static void for_each_pair(const Choice& choice, const Visit& visit) {
    for (size_t a = 0; a < kNumProperties; ++a)
      for (size_t b = a + 1; b < kNumProperties; ++b) visit(ValuePair{a, choice[a], b, choice[b]});
  }

  static size_t num_new_pairs(const Choice& choice, const std::set<ValuePair>& missing) {
    size_t count = 0;
    for_each_pair(choice, [&](const ValuePair& pair) { count += missing.count(pair); });
    return count;
  }

  // Takes for each property in turn the value that adds the most new pairs, until nothing changes.
  Choice improved(Choice choice, const std::set<ValuePair>& missing) const {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t property = 0; property < kNumProperties; ++property)
        for (size_t value = 0; value < num_values_[property]; ++value) {
          Choice other = choice;
          other[property] = value;
          if (num_new_pairs(other, missing) <= num_new_pairs(choice, missing)) continue;
          choice = other;
          changed = true;
        }
    }
    return choice;
  }

  Choice num_values_;
};

}  // namespace fsdp::testing
