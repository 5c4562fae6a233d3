#include "fsdp/optim/parameter_rules.h"

#include <algorithm>
#include <cmath>

#include "fsdp/base/error.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// What became of a rule.
struct RuleUse {
  bool matches = false;  // some parameter
  bool decides = false;  // for one that no earlier rule matches
};

bool matches(const ParameterRule& rule, const ParameterTraits& parameter) {
  return std::any_of(parameter.names.begin(), parameter.names.end(),
                     [&](const std::string& name) { return matches_glob(rule.pattern, name); });
}

HyperParameters hyper_parameters(const ParameterRuleOptions& options, const ParameterRule* rule,
                                 const ParameterTraits& parameter) {
  const bool is_spared = options.spares_vectors && parameter.num_dims < 2;
  HyperParameters result{.weight_decay = is_spared ? 0.0 : options.weight_decay};
  if (rule == nullptr) return result;
  result.rate_scale = rule->rate_scale;
  result.weight_decay = rule->weight_decay.value_or(result.weight_decay);
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
    const ParameterRule* first = nullptr;
    for (size_t i = 0; i < options.rules.size(); ++i) {
      // Which rules are of use is known early; then only the first match is of interest.
      if ((first != nullptr && uses[i].matches) || !matches(options.rules[i], parameter)) continue;
      uses[i].matches = true;
      if (first != nullptr) continue;
      first = &options.rules[i];
      uses[i].decides = true;
    }
    results.push_back(hyper_parameters(options, first, parameter));
  }
  check_uses(options, uses, parameters);
  return results;
}

}  // namespace fsdp
