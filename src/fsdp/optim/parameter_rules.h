// Weight decay and learning-rate factors by rules over names and shapes of parameters, and a rank's
// shard cut accordingly.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/optim/optimizer_options.h"

namespace fsdp {

// --- rules ---------------------------------------------------------------------------------------

// How the parameters of a model are updated. Only the first rule that matches a parameter counts:
// so exceptions come before the general rules, and one line tells how a parameter is treated.
struct ParameterRuleOptions {
  // For parameters whose rule names none.
  double weight_decay = 0.0;
  // Whether parameters of fewer than two dimensions (biases, norms, scalars) do not decay.
  bool spares_vectors = true;
  // In the order in which they are tried.
  std::vector<ParameterRule> rules = {};

  // Throws UsageError with the field, its value and the fix.
  void validate() const;
};

// The properties of a parameter that rules use.
struct ParameterTraits {
  std::vector<std::string>
      names;  // more than one where modules share it; a rule for any is for all
  int64_t num_dims = 0;
};

// How an update treats a parameter.
struct HyperParameters {
  double weight_decay = 0.0;
  double rate_scale = 1.0;
  int32_t rule = -1;  // the index of the rule that says so, whose numbers may change; -1: none

  friend bool operator==(const HyperParameters&, const HyperParameters&) = default;
};

// One result per parameter. `parameters` are those of the whole model: UsageError for a rule that
// matches none of them (with the nearest name), or only those of earlier rules.
std::vector<HyperParameters> apply_rules(const ParameterRuleOptions& options,
                                         std::span<const ParameterTraits> parameters);

// --- spans of a shard ----------------------------------------------------------------------------

struct RuleSpan {
  FlatRange flat;           // in the group's whole buffer
  int64_t local_begin = 0;  // in the shard's own count
  HyperParameters hyper;

  friend bool operator==(const RuleSpan&, const RuleSpan&) = default;
};

// Cuts `shard` (all of a rank's ranges, or those of one place: layout/state_bytes.h), in its order,
// into the longest spans with equal hyper-parameters. Padding belongs to the tensor before it, at a
// range's begin to the one after it; a range of padding alone has the default hyper-parameters.
// `of_tensors` has one entry per tensor of the layout.
std::vector<RuleSpan> rule_spans(const FlatLayout& layout,
                                 std::span<const HyperParameters> of_tensors,
                                 std::span<const ShardRange> shard);

// rule_spans() for a layout of matrices: one span for each that the shard has, without padding.
std::vector<RuleSpan> matrix_spans(const FlatLayout& layout,
                                   std::span<const HyperParameters> of_tensors,
                                   std::span<const ShardRange> shard);

}  // namespace fsdp
