#include "fsdp/optim/parameter_rules.h"

#include <algorithm>
#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Whether a rule was of use.
struct RuleUse {
  bool matches = false;  // some parameter
  bool decides = false;  // for one that no earlier rule matches
};

bool matches(const ParameterRule& rule, const ParameterTraits& parameter) {
  const std::string_view pattern = rule.pattern;
  for (size_t begin = 0; begin <= pattern.size();) {
    const size_t end = std::min(pattern.find('|', begin), pattern.size());
    const std::string alternative(pattern.substr(begin, end - begin));
    for (const std::string& name : parameter.names)
      if (matches_glob(alternative, name)) return true;
    begin = end + 1;
  }
  return false;
}

HyperParameters hyper_parameters(const ParameterRuleOptions& options, int32_t rule,
                                 const ParameterTraits& parameter) {
  const bool is_spared = options.spares_vectors && parameter.num_dims < 2;
  HyperParameters result{.weight_decay = is_spared ? 0.0 : options.weight_decay, .rule = rule};
  if (rule < 0) return result;
  const ParameterRule& given = options.rules[static_cast<size_t>(rule)];
  result.rate_scale = given.rate_scale;
  result.weight_decay = given.weight_decay.value_or(result.weight_decay);
  return result;
}

[[noreturn]] void refuse_rule_for_nothing(const ParameterRule& rule,
                                          std::span<const ParameterTraits> parameters) {
  std::vector<std::string> names;
  for (const ParameterTraits& parameter : parameters)
    names.insert(names.end(), parameter.names.begin(), parameter.names.end());
  const std::string near = nearest_to_glob(rule.pattern, names);
  throw UsageError(
      concat("rule '", rule.pattern, "' matches no parameter; ",
             near.empty() ? "correct or drop it" : concat("the nearest is '", near, "'")));
}

void check_uses(const ParameterRuleOptions& options, std::span<const RuleUse> uses,
                std::span<const ParameterTraits> parameters) {
  for (size_t i = 0; i < uses.size(); ++i) {
    if (!uses[i].matches) refuse_rule_for_nothing(options.rules[i], parameters);
    if (!uses[i].decides)
      throw UsageError(concat("rule '", options.rules[i].pattern,
                              "' has no effect, for earlier rules match all its parameters; put it "
                              "before them or drop it"));
  }
}

void check_factor(const std::string& field, double value) {
  if (!(value >= 0 && std::isfinite(value)))
    throw UsageError(concat(field, " is ", value, "; it must be a number of 0 or more"));
}

// A tensor with elements.
struct PlacedTensor {
  FlatRange flat;
  HyperParameters hyper;
};

std::vector<PlacedTensor> in_flat_order(const FlatLayout& layout,
                                        std::span<const HyperParameters> of_tensors) {
  std::vector<PlacedTensor> placed;
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    const FlatRange flat = layout.tensor_range(tensor);
    if (!flat.empty()) placed.push_back({flat, of_tensors[static_cast<size_t>(tensor)]});
  }
  std::sort(placed.begin(), placed.end(), [](const PlacedTensor& a, const PlacedTensor& b) {
    return a.flat.begin < b.flat.begin;
  });
  return placed;
}

// A range of padding alone needs no change: its weights and gradients are zeros.
void add_spans(std::span<const PlacedTensor> tensors, const ShardRange& range,
               std::vector<RuleSpan>& spans) {
  RuleSpan span{range.flat, range.local_begin, {}};
  auto tensor = std::partition_point(tensors.begin(), tensors.end(), [&](const PlacedTensor& each) {
    return each.flat.end <= range.flat.begin;
  });
  if (tensor != tensors.end() && tensor->flat.begin < range.flat.end) span.hyper = tensor->hyper;
  for (; tensor != tensors.end() && tensor->flat.begin < range.flat.end; ++tensor) {
    if (tensor->hyper == span.hyper) continue;
    span.flat.end = tensor->flat.begin;
    spans.push_back(span);
    span = {{tensor->flat.begin, range.flat.end},
            range.local_begin + (tensor->flat.begin - range.flat.begin),
            tensor->hyper};
  }
  if (!span.flat.empty()) spans.push_back(span);
}

}  // namespace

void ParameterRuleOptions::validate() const {
  check_factor("weight_decay", weight_decay);
  for (const ParameterRule& rule : rules) {
    if (rule.pattern.empty())
      throw UsageError("a rule's pattern is ''; use a name, or a pattern such as '*.bias'");
    const std::string of_rule = concat(" of rule '", rule.pattern, "'");
    if (rule.weight_decay) check_factor("weight_decay" + of_rule, *rule.weight_decay);
    check_factor("rate_scale" + of_rule, rule.rate_scale);
  }
}

std::vector<HyperParameters> apply_rules(const ParameterRuleOptions& options,
                                         std::span<const ParameterTraits> parameters) {
  options.validate();
  std::vector<RuleUse> uses(options.rules.size());
  std::vector<HyperParameters> results;
  results.reserve(parameters.size());
  for (const ParameterTraits& parameter : parameters) {
    int32_t first = -1;
    for (size_t i = 0; i < options.rules.size(); ++i) {
      // Once a rule is known to match something, only the first match of each parameter counts.
      if ((first >= 0 && uses[i].matches) || !matches(options.rules[i], parameter)) continue;
      uses[i].matches = true;
      if (first >= 0) continue;
      first = static_cast<int32_t>(i);
      uses[i].decides = true;
    }
    results.push_back(hyper_parameters(options, first, parameter));
  }
  check_uses(options, uses, parameters);
  return results;
}

std::vector<RuleSpan> rule_spans(const FlatLayout& layout,
                                 std::span<const HyperParameters> of_tensors,
                                 std::span<const ShardRange> shard) {
  FSDP_ASSERT(static_cast<int64_t>(of_tensors.size()) == layout.num_tensors());
  const std::vector<PlacedTensor> tensors = in_flat_order(layout, of_tensors);
  std::vector<RuleSpan> spans;
  for (const ShardRange& range : shard) add_spans(tensors, range, spans);
  return spans;
}

std::vector<RuleSpan> matrix_spans(const FlatLayout& layout,
                                   std::span<const HyperParameters> of_tensors,
                                   std::span<const ShardRange> shard) {
  FSDP_ASSERT(static_cast<int64_t>(of_tensors.size()) == layout.num_tensors());
  std::vector<RuleSpan> spans;
  for (const ShardRange& range : shard)
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
      const int64_t begin = layout.tensor_range(tensor).begin;
      for (const OwnedMatrix& part : layout.matrices_of(tensor)) {
        const FlatRange flat{begin + part.range.begin, begin + part.range.end};
        if (flat.begin < range.flat.begin || flat.begin >= range.flat.end) continue;
        FSDP_ASSERT(flat.end <= range.flat.end, "matrix at ", flat.begin, " is cut");
        spans.push_back({flat, range.local_begin + flat.begin - range.flat.begin,
                         of_tensors[static_cast<size_t>(tensor)]});
      }
    }
  return spans;
}

}  // namespace fsdp
