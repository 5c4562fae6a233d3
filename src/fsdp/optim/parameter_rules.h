// Which parameters are updated how: weight decay and a factor of the learning rate, by rules over
// their names and shapes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

struct ParameterRule {
  // Of the names it is for: `*` is any text (dots too), `?` one character; "*.bias",
  // "embed.weight".
  std::string pattern;
  // Their weight decay, whatever their shape. nullopt: as without the rule.
  std::optional<double> weight_decay = std::nullopt;
  // Their learning rate is the schedule's times this; 0 leaves them as they are.
  double rate_scale = 1.0;
};

// How the parameters of a model are updated. The first rule that matches a parameter is the one
// that counts, the others do nothing to it: so exceptions come before what they are exceptions of,
// and how a parameter is treated can be read in one line.
struct ParameterRuleOptions {
  // Of parameters whose rule names none.
  double weight_decay = 0.0;
  // Whether it is left out for parameters of fewer than two dimensions: biases, norms, scalars.
  bool spares_vectors = true;
  // In the order in which they are tried.
  std::vector<ParameterRule> rules = {};

  // Throws UsageError with the field, its value and the fix.
  void validate() const;
};

// What rules ask of a parameter.
struct ParameterTraits {
  std::vector<std::string>
      names;  // more than one where modules share it; a rule for any is for all
  int64_t num_dims = 0;
};

// What an update does with a parameter.
struct HyperParameters {
  double weight_decay = 0.0;
  double rate_scale = 1.0;

  friend bool operator==(const HyperParameters&, const HyperParameters&) = default;
};

// One result per parameter. `parameters` are those of the whole model: UsageError for a rule that
// is for none of them (with the nearest name), or that earlier rules leave none to.
std::vector<HyperParameters> apply_rules(const ParameterRuleOptions& options,
                                         std::span<const ParameterTraits> parameters);

}  // namespace fsdp
