// A rank's shard cut into the runs of elements that are updated with the same hyper-parameters.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/optim/parameter_rules.h"

namespace fsdp {

struct RuleSpan {
  FlatRange flat;           // in the group's whole buffer
  int64_t local_begin = 0;  // as the shard's ranges count
  HyperParameters hyper;

  friend bool operator==(const RuleSpan&, const RuleSpan&) = default;
};

// In the order of the shard, and none of them empty: together exactly `shard` (all of a rank's
// ranges, or those of one place: layout/state_bytes.h). A span is as long as can be inside one
// range: tensors with equal hyper-parameters are one span, and what is padding belongs to the
// tensor before it, at a range's begin to the one after it (and in a range of padding alone to
// nobody: its hyper-parameters are the defaults). `of_tensors` has one entry per tensor of the
// layout.
std::vector<RuleSpan> rule_spans(const FlatLayout& layout,
                                 std::span<const HyperParameters> of_tensors,
                                 std::span<const ShardRange> shard);

}  // namespace fsdp
