// Which reductions a gradient goes through, in which order, and where it is divided: one rule.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/layout/placement.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/shard/options.h"

namespace fsdp {

enum class Axis : uint8_t { kInner, kOuter };

// "inner", "outer"
const char* name_of(Axis axis);

enum class ReduceWhen : uint8_t {
  kEachBackward,  // into the main gradients, where microbatches add up
  kCycleEnd,      // once, after the last microbatch
};

// One change of placement along one axis: Partial to Shard is a reduce-scatter, Partial to
// Replicate an all-reduce.
struct ReductionStage {
  Axis axis = Axis::kInner;
  Placement to = Placement::kShard;
  ReduceWhen when = ReduceWhen::kEachBackward;
  double scale = 1.0;

  friend bool operator==(const ReductionStage&, const ReductionStage&) = default;
};

// From what a rank's backward left behind (Partial along both axes) to the optimizer's placement.
// An axis of one rank has no stage, unless it talks alone. In the order in which they run.
//
// A gradient is divided exactly once, by the number of ranks that contribute, in the first stage:
// its running sum is wide, and later stages add what is already divided. Without any stage there is
// one rank and nothing to divide by.
std::vector<ReductionStage> reduction_path(const Strategy& strategy, MeshShape mesh,
                                           GradientOf gradient);

}  // namespace fsdp
