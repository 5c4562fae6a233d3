#include "fsdp/checkpoint/names/name_pattern.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

bool is_digit(char c) { return '0' <= c && c <= '9'; }

bool is_field_name(std::string_view text) {
  const auto is_letter = [](char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || c == '_';
  };
  return !text.empty() && is_letter(text[0]) &&
         std::all_of(text.begin(), text.end(), [&](char c) { return is_letter(c) || is_digit(c); });
}

std::string_view without_spaces_around(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

int64_t num_letters(std::string_view pattern) {
  return std::count_if(pattern.begin(), pattern.end(), [](char c) { return c != '*' && c != '?'; });
}

// "layers.1" also matches everything inside that module, but nothing in "layers.12".
bool owns(const std::string& modules, std::string_view tensor) {
  return matches_glob(modules, tensor) || matches_glob(modules + ".*", tensor);
}

[[noreturn]] void refuse_unknown(const ModuleFields& fields, std::string_view tensor,
                                 const std::string& field) {
  std::vector<std::string> known;
  for (const FieldsOfModules& entry : fields)
    for (const auto& [name, value] : entry.values)
      if (owns(entry.modules, tensor)) known.push_back(name);
  const std::string near = nearest(field, known);
  throw Error(concat("the field '", field, "' of the module of tensor '", tensor, "' is unknown; ",
                     near.empty() ? "" : concat("there is '", near, "'; "),
                     "add it to the fields of a pattern that describes the module"));
}

constexpr size_t kMaxPlaces = 9;  // $1 to $9
constexpr std::string_view kSpecial = "*?#()|";

[[noreturn]] void refuse_pattern(std::string_view text, std::string_view rule) {
  throw UsageError(concat("pattern is '", text, "'; ", rule));
}

[[noreturn]] void refuse_template(std::string_view text, std::string_view rule) {
  throw UsageError(concat("name is '", text, "'; ", rule));
}

// The texts between the bars of "a|b|c".
std::vector<std::string> alternatives(std::string_view text) {
  std::vector<std::string> result;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('|', begin), text.size());
    result.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return result;
}

}  // namespace

std::optional<int64_t> field_of(const ModuleFields& fields, std::string_view tensor,
                                const std::string& field) {
  std::optional<int64_t> best;
  int64_t best_letters = -1;
  for (const FieldsOfModules& entry : fields) {
    const auto found = entry.values.find(field);
    const int64_t letters = num_letters(entry.modules);
    if (found == entry.values.end() || letters < best_letters || !owns(entry.modules, tensor))
      continue;
    best = found->second;
    best_letters = letters;
  }
  return best;
}

FieldSum::FieldSum(std::string_view text) {
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('+', begin), text.size());
    const std::string_view term = without_spaces_around(text.substr(begin, end - begin));
    int64_t number = 0;
    const auto [stop, problem] = std::from_chars(term.data(), term.data() + term.size(), number);
    if (is_field_name(term)) {
      fields_.emplace_back(term);
    } else if (!term.empty() && is_digit(term[0]) && problem == std::errc() &&
               stop == term.data() + term.size()) {
      constant_ = checked_add(constant_, number);
    } else {
      throw UsageError(concat("'", text, "' is not a sum of whole numbers and fields, because of '",
                              term, "'; write it like 24 or kv_lora_rank + 8"));
    }
    begin = end + 1;
  }
}

int64_t FieldSum::value(const ModuleFields& fields, std::string_view tensor) const {
  int64_t sum = constant_;
  for (const std::string& field : fields_) {
    const std::optional<int64_t> value = field_of(fields, tensor, field);
    if (!value) refuse_unknown(fields, tensor, field);
    sum = checked_add(sum, *value);
  }
  return sum;
}

NamePattern::NamePattern(std::string_view text) {
  if (text.empty()) refuse_pattern(text, "give the end of a tensor name, or * for all names");
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '(') {
      const size_t close = text.find(')', at);
      if (close == std::string_view::npos) refuse_pattern(text, "add the missing ')'");
      const std::string_view inside = text.substr(at + 1, close - at - 1);
      if (inside.find_first_of("*?#(") != std::string_view::npos)
        refuse_pattern(text, "only texts and | may stand between ( and )");
      parts_.push_back({Part::Kind::kChoice, alternatives(inside)});
      at = close + 1;
    } else if (c == ')' || c == '|') {
      refuse_pattern(text, concat("write '", c, "' only in a choice like (weight|bias)"));
    } else if (kSpecial.find(c) != std::string_view::npos) {
      parts_.push_back({c == '*'   ? Part::Kind::kStar
                        : c == '?' ? Part::Kind::kOneCharacter
                                   : Part::Kind::kNumber,
                        {}});
      ++at;
    } else {
      const size_t end = std::min(text.find_first_of(kSpecial, at), text.size());
      parts_.push_back({Part::Kind::kText, {std::string(text.substr(at, end - at))}});
      at = end;
    }
  }
  num_places_ = static_cast<size_t>(std::count_if(
      parts_.begin(), parts_.end(), [](const Part& p) { return p.kind != Part::Kind::kText; }));
  if (num_places_ > kMaxPlaces)
    refuse_pattern(text, concat("it has ", num_places_, " places; ", kMaxPlaces,
                                " are possible, $1 to $9: write some of them as text"));
}

std::vector<size_t> NamePattern::ends(size_t index, std::string_view name, size_t begin) const {
  const Part& part = parts_[index];
  std::vector<size_t> result;
  switch (part.kind) {
    case Part::Kind::kText:
    case Part::Kind::kChoice:
      for (const std::string& text : part.texts)
        if (name.substr(begin).starts_with(text)) result.push_back(begin + text.size());
      break;
    case Part::Kind::kStar:
      for (size_t end = begin; end <= name.size(); ++end) result.push_back(end);
      break;
    case Part::Kind::kOneCharacter:
      if (begin < name.size()) result.push_back(begin + 1);
      break;
    case Part::Kind::kNumber: {
      size_t end = begin;
      while (end < name.size() && is_digit(name[end])) ++end;
      if (end > begin) result.push_back(end);
      break;
    }
  }
  return result;
}

// The search in one name. Remembers failures: with several stars, repeating them would take a time
// that grows with a power of the name's length.
struct NamePattern::Search {
  std::string_view name;
  std::vector<std::string> found;
  std::vector<bool> failed;  // [part, begin]
};

bool NamePattern::match_from(size_t index, size_t begin, Search& search) const {
  if (index == parts_.size()) return begin == search.name.size();
  const size_t state = index * (search.name.size() + 1) + begin;
  if (search.failed[state]) return false;
  const bool is_place = parts_[index].kind != Part::Kind::kText;
  for (const size_t end : ends(index, search.name, begin)) {
    if (is_place) search.found.emplace_back(search.name.substr(begin, end - begin));
    if (match_from(index + 1, end, search)) return true;
    if (is_place) search.found.pop_back();
  }
  search.failed[state] = true;
  return false;
}

std::optional<NameMatch> NamePattern::match(std::string_view name) const {
  Search search{name, {}, std::vector<bool>(parts_.size() * (name.size() + 1), false)};
  for (size_t begin = 0; begin <= name.size();) {
    search.found = {std::string(name.substr(begin))};
    if (match_from(0, begin, search))
      return NameMatch{std::string(name.substr(0, begin)), std::move(search.found)};
    const size_t dot = name.find('.', begin);
    if (dot == std::string_view::npos) break;
    begin = dot + 1;
  }
  return std::nullopt;
}

NameTemplate::NameTemplate(std::string_view text, const NamePattern& pattern) {
  if (text.empty()) refuse_template(text, "give the name a section is stored under");
  const auto place_at = [&](size_t at) -> size_t {
    if (at + 1 >= text.size() || text[at] != '$' || !is_digit(text[at + 1]))
      refuse_template(text, "write places as $0 to $9, and sums as {$2 + field}");
    const auto place = static_cast<size_t>(text[at + 1] - '0');
    if (place > pattern.num_places())
      refuse_template(text, concat("its pattern has ", pattern.num_places(), " places, so $", place,
                                   " stands for nothing"));
    return place;
  };
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '$') {
      parts_.push_back({.text = {}, .place = place_at(at)});
      at += 2;
    } else if (text[at] == '{') {
      const size_t close = text.find('}', at);
      if (close == std::string_view::npos) refuse_template(text, "add the missing '}'");
      const size_t place = place_at(at + 1);
      const size_t plus = text.substr(0, close).find_first_not_of(' ', at + 3);
      if (plus == std::string_view::npos || text[plus] != '+')
        refuse_template(text, "write sums as {$2 + field}");
      parts_.push_back(
          {.text = {}, .place = place, .sum = FieldSum(text.substr(plus + 1, close - plus - 1))});
      at = close + 1;
    } else {
      const size_t end = std::min(text.find_first_of("${", at), text.size());
      parts_.push_back({.text = std::string(text.substr(at, end - at))});
      at = end;
    }
  }
}

std::string NameTemplate::fill(const NameMatch& match, const ModuleFields& fields,
                               std::string_view owner) const {
  std::string name = match.before;
  for (const Part& part : parts_) {
    if (!part.place) {
      name += part.text;
      continue;
    }
    const std::string& found = match.found.at(*part.place);
    if (!part.sum) {
      name += found;
      continue;
    }
    int64_t number = 0;
    const char* const end = found.data() + found.size();
    const auto [stop, problem] = std::from_chars(found.data(), end, number);
    FSDP_CHECK(problem == std::errc() && stop == end, "'", found, "' in the name of tensor '",
               owner, "' is not a whole number that a field can be added to; ",
               "describe that place by # in the pattern");
    const int64_t sum = checked_add(number, part.sum->value(fields, owner));
    FSDP_CHECK(sum >= 0, "'", found, "' in the name of tensor '", owner, "' would become ", sum,
               "; correct the field that is added to it");
    name += std::to_string(sum);
  }
  return name;
}

}  // namespace fsdp
