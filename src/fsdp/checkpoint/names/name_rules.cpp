#include "fsdp/checkpoint/names/name_rules.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/names/name_pattern.h"

namespace fsdp {

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
