#include "fsdp/checkpoint/names/name_rules.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"

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

// The texts between the separators: three of "a|b|c", one of "a".
std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> result;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    result.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return result;
}

// A field of the module that owns a tensor; nullopt if no pattern states it.
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

}  // namespace

// --- fields, patterns and templates --------------------------------------------------------------

// A sum of whole numbers and fields: "24", "kv_lora_rank + qk_pos_emb_head_dim".
class FieldSum {
 public:
  // Throws a UsageError if the text is not such a sum.
  explicit FieldSum(std::string_view text) {
    for (const std::string& each : split(text, '+')) {
      const std::string_view term = without_spaces_around(each);
      int64_t number = 0;
      const auto [stop, problem] = std::from_chars(term.data(), term.data() + term.size(), number);
      if (is_field_name(term)) {
        fields_.emplace_back(term);
      } else if (!term.empty() && is_digit(term[0]) && problem == std::errc() &&
                 stop == term.data() + term.size()) {
        constant_ = checked_add(constant_, number);
      } else {
        throw UsageError(concat("'", text,
                                "' is not a sum of whole numbers and fields, because of '", term,
                                "'; write it like 24 or kv_lora_rank + 8"));
      }
    }
  }

  // Throws an Error if the tensor's module does not state one of the fields.
  int64_t value(const ModuleFields& fields, std::string_view tensor) const {
    int64_t sum = constant_;
    for (const std::string& field : fields_) {
      const std::optional<int64_t> value = field_of(fields, tensor, field);
      if (!value) refuse_unknown(fields, tensor, field);
      sum = checked_add(sum, *value);
    }
    return sum;
  }

 private:
  int64_t constant_ = 0;
  std::vector<std::string> fields_;
};

struct NameMatch {
  std::string before;              // the modules around it, with their last dot; "" for none
  std::vector<std::string> found;  // [0]: the rest of the name; [1] ...: the text at each place
};

// Matches the end of a name, from the beginning of a module: "mlp.weight" matches
// "decoder.mlp.weight", too, but not "my_mlp.weight".
//
//   *      any text, also none and also over dots; as little as possible
//   ?      one character
//   #      a whole number, as many digits as there are
//   (a|b)  one of the texts, the first that fits; one may be empty: "weight(|_w|_v)"
class NamePattern {
 public:
  // Throws a UsageError that names the fault.
  explicit NamePattern(std::string_view text) {
    if (text.empty()) refuse_pattern(text, "give the end of a tensor name, or * for all names");
    for (size_t at = 0; at < text.size();) {
      const char c = text[at];
      if (c == '(') {
        const size_t close = text.find(')', at);
        if (close == std::string_view::npos) refuse_pattern(text, "add the missing ')'");
        const std::string_view inside = text.substr(at + 1, close - at - 1);
        if (inside.find_first_of("*?#(") != std::string_view::npos)
          refuse_pattern(text, "only texts and | may stand between ( and )");
        parts_.push_back({Part::Kind::kChoice, split(inside, '|')});
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

  std::optional<NameMatch> match(std::string_view name) const {
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

  // The number of places that capture text.
  size_t num_places() const { return num_places_; }

 private:
  struct Part {
    enum class Kind { kText, kStar, kOneCharacter, kNumber, kChoice };
    Kind kind = Kind::kText;
    std::vector<std::string> texts;  // one for kText, the alternatives of kChoice
  };

  // The search in one name. Remembers failures: with several stars, repeating them would take a
  // time that grows with a power of the name's length.
  struct Search {
    std::string_view name;
    std::vector<std::string> found;
    std::vector<bool> failed;  // [part, begin]
  };

  // Places where the text of part `index` may end if it begins at `begin`, the preferred one first.
  std::vector<size_t> ends(size_t index, std::string_view name, size_t begin) const {
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

  bool match_from(size_t index, size_t begin, Search& search) const {
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

  std::vector<Part> parts_;
  size_t num_places_ = 0;
};

// A name with places to fill: "$0_w" is the matched text and "_w", $1 to $9 are the captured texts,
// and "{$2 + expert_offset}" is the second one as a number plus a sum of fields.
class NameTemplate {
 public:
  // Throws a UsageError, also for places that the pattern does not have.
  NameTemplate(std::string_view text, const NamePattern& pattern) {
    if (text.empty()) refuse_template(text, "give the name a section is stored under");
    const auto place_at = [&](size_t at) -> size_t {
      if (at + 1 >= text.size() || text[at] != '$' || !is_digit(text[at + 1]))
        refuse_template(text, "write places as $0 to $9, and sums as {$2 + field}");
      const auto place = static_cast<size_t>(text[at + 1] - '0');
      if (place > pattern.num_places())
        refuse_template(text, concat("its pattern has ", pattern.num_places(), " places, so $",
                                     place, " stands for nothing"));
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

  // The fields are those of the module of tensor `owner`.
  std::string fill(const NameMatch& match, const ModuleFields& fields,
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

 private:
  // Text, or a place, or a place plus a sum.
  struct Part {
    std::string text;
    std::optional<size_t> place = std::nullopt;
    std::optional<FieldSum> sum = std::nullopt;
  };

  std::vector<Part> parts_;
};

namespace {

bool is_rename(const NameRule& rule) {
  return rule.sections.size() == 1 && rule.sections[0].size.empty();
}

std::string title_of(const NameRule& rule) {
  return concat("rule '", rule.title.empty() ? rule.pattern : rule.title, "'");
}

// "tensor 'a.weight_w' of shape [4, 3] (made from 'a.weight')"
std::string what(const TensorSection& section, const std::string& owner) {
  return concat("tensor '", shown(section.name), "' of shape ", list_text(section.shape),
                section.name == owner ? "" : concat(" (made from '", owner, "')"));
}

}  // namespace

struct NameRules::Parsed {
  explicit Parsed(const NameRule& rule);

  NamePattern pattern;
  std::vector<NameTemplate> names;
  std::vector<std::optional<FieldSum>> sizes;  // nullopt: an equal part
};

NameRules::NameRules(std::vector<NameRule> rules, ModuleFields fields)
    : rules_(std::move(rules)), fields_(std::move(fields)) {
  std::vector<Parsed> parsed;
  for (size_t i = 0; i < rules_.size(); ++i) {
    try {
      parsed.emplace_back(rules_[i]);
    } catch (const UsageError& error) {
      throw UsageError(concat("rules[", i, "]: ", error.what()));
    }
  }
  parsed_ = std::make_shared<const std::vector<Parsed>>(std::move(parsed));
}

NameRules::Parsed::Parsed(const NameRule& rule) : pattern(rule.pattern) {
  if (rule.sections.empty())
    throw UsageError(concat(title_of(rule), " has no sections; give one with a name, or several"));
  if (rule.dim < 0) throw UsageError(concat("dim is ", rule.dim, "; dims are counted from 0 up"));
  if (rule.condition && rule.condition->field.empty())
    throw UsageError("the condition has no field; name the one that decides");
  for (const SectionRule& section : rule.sections) {
    names.emplace_back(section.name, pattern);
    sizes.push_back(section.size.empty() ? std::nullopt : std::optional<FieldSum>(section.size));
  }
}

std::vector<TensorSection> NameRules::sections(const std::string& name,
                                               std::span<const int64_t> shape) const {
  return apply(name, shape, NameRule::Scope::kModelNames);
}

std::vector<TensorSection> NameRules::sections_of_stored(const std::string& name,
                                                         std::span<const int64_t> shape) const {
  return apply(name, shape, NameRule::Scope::kEveryName);
}

std::vector<TensorSection> NameRules::apply(const std::string& name, std::span<const int64_t> shape,
                                            NameRule::Scope names) const {
  std::vector<TensorSection> sections = {{.name = name,
                                          .shape = std::vector<int64_t>(shape.begin(), shape.end()),
                                          .offsets = std::vector<int64_t>(shape.size(), 0)}};
  for (size_t i = 0; i < rules_.size(); ++i) {
    if (rules_[i].scope == NameRule::Scope::kModelNames && names == NameRule::Scope::kEveryName)
      continue;
    std::vector<TensorSection> divided;
    for (TensorSection& section : sections) {
      std::vector<TensorSection> parts = divide(i, section, name);
      if (parts.empty()) parts.push_back(std::move(section));
      std::move(parts.begin(), parts.end(), std::back_inserter(divided));
    }
    sections = std::move(divided);
  }
  for (const TensorSection& section : sections) check_final(section.name, name);
  return sections;
}

std::optional<NameMatch> NameRules::match(size_t index, const std::string& name,
                                          const std::string& owner) const {
  if (const std::optional<FieldCondition>& condition = rules_[index].condition) {
    const std::optional<int64_t> value = field_of(fields_, owner, condition->field);
    if (!value && condition->unknown == FieldCondition::Unknown::kSkip) return std::nullopt;
    if (value && condition->equals && *value != *condition->equals) return std::nullopt;
  }
  return (*parsed_)[index].pattern.match(name);
}

std::vector<TensorSection> NameRules::divide(size_t index, const TensorSection& section,
                                             const std::string& owner) const {
  const std::optional<NameMatch> found = match(index, section.name, owner);
  if (!found) return {};
  std::vector<TensorSection> parts;
  const auto fill = [&](size_t s) {
    return (*parsed_)[index].names[s].fill(*found, fields_, owner);
  };
  if (is_rename(rules_[index]))
    return {{.name = fill(0), .shape = section.shape, .offsets = section.offsets}};

  const std::vector<int64_t> part_sizes = sizes(index, section, owner);
  const auto dim = static_cast<size_t>(rules_[index].dim);
  int64_t begin = 0;
  for (size_t s = 0; s < part_sizes.size(); ++s) {
    TensorSection part{.name = fill(s), .shape = section.shape, .offsets = section.offsets};
    part.shape[dim] = part_sizes[s];
    part.offsets[dim] += begin;
    begin += part_sizes[s];
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<int64_t> NameRules::sizes(size_t index, const TensorSection& section,
                                      const std::string& owner) const {
  const NameRule& rule = rules_[index];
  FSDP_CHECK(rule.dim < static_cast<int64_t>(section.shape.size()), what(section, owner),
             " has no dim ", rule.dim, ", which ", title_of(rule),
             " divides; correct its dim, or its pattern");
  const int64_t whole = section.shape[static_cast<size_t>(rule.dim)];
  const std::vector<std::optional<FieldSum>>& given = (*parsed_)[index].sizes;

  std::vector<int64_t> result;
  int64_t left = whole;
  int64_t num_equal = 0;
  for (const std::optional<FieldSum>& size : given) {
    result.push_back(size ? size->value(fields_, owner) : 0);
    FSDP_CHECK(result.back() >= 0, what(section, owner), " would get a section of ", result.back(),
               " by ", title_of(rule), "; correct the fields of its module");
    // Cannot overflow: both are at least 0 as long as the sections fit.
    left = left < 0 ? left : left - result.back();
    num_equal += size ? 0 : 1;
  }
  if (num_equal == 0 || left < 0) {
    FSDP_CHECK(left == 0, what(section, owner), " has ", whole, " along dim ", rule.dim, ", but ",
               title_of(rule), " divides it into ", list_text(result),
               "; correct the rule or the fields of its module");
    return result;
  }
  FSDP_CHECK(left % num_equal == 0, what(section, owner), " has ", left, " along dim ", rule.dim,
             " for the ", num_equal, " equal sections of ", title_of(rule), ", and ", left,
             " is not divisible by ", num_equal,
             "; correct the shape, or make the rule not apply to its module");
  for (size_t s = 0; s < given.size(); ++s)
    if (!given[s]) result[s] = left / num_equal;
  return result;
}

// Rules are applied to a checkpoint's names again on loading, so they must not change them.
void NameRules::check_final(const std::string& stored, const std::string& model) const {
  for (size_t i = 0; i < rules_.size(); ++i) {
    if (rules_[i].scope == NameRule::Scope::kModelNames) continue;
    FSDP_CHECK(!match(i, stored, stored), "tensor '", model, "' would be stored as '", stored,
               "', which ", title_of(rules_[i]),
               " would change again when it is read; choose a name that no pattern describes, or ",
               "limit the rule to model names");
  }
}

void check_unique(const NameRules& rules, std::span<const NamedShape> tensors) {
  std::map<std::string, std::string> stored;  // name -> its model tensor
  for (const NamedShape& tensor : tensors) {
    for (const TensorSection& section : rules.sections(tensor.name, tensor.shape)) {
      const auto [other, is_new] = stored.emplace(section.name, tensor.name);
      FSDP_CHECK(is_new, "tensors '", other->second, "' and '", tensor.name,
                 "' would both be stored as '", section.name,
                 "'; correct the rules so that every stored name is used once");
    }
  }
}

}  // namespace fsdp
