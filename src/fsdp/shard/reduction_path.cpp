#include "fsdp/shard/reduction_path.h"

#include <algorithm>

namespace fsdp {

const char* name_of(Axis axis) { return axis == Axis::kInner ? "inner" : "outer"; }

std::vector<ReductionStage> reduction_path(const Strategy& strategy, MeshShape mesh,
                                           GradientOf gradient) {
  struct Side {
    Axis axis;
    bool communicates;
    Placement gradient;
    Placement optimizer;
  };
  const Side sides[] = {
      {Axis::kInner, mesh.communicates_inner(), strategy.gradient.inner, strategy.optimizer.inner},
      {Axis::kOuter, mesh.communicates_outer(), strategy.gradient.outer, strategy.optimizer.outer}};
  std::vector<ReductionStage> path;
  for (const Side& side : sides) {
    if (!side.communicates) continue;
    const bool waits = side.gradient == Placement::kPartial;
    path.push_back({.axis = side.axis,
                    .to = waits ? side.optimizer : side.gradient,
                    .when = waits ? ReduceWhen::kCycleEnd : ReduceWhen::kEachBackward});
  }
  std::stable_partition(path.begin(), path.end(), [](const ReductionStage& stage) {
    return stage.when == ReduceWhen::kEachBackward;
  });
  if (!path.empty() && gradient == GradientOf::kMeanOverRanks)
    path.front().scale = 1.0 / static_cast<double>(mesh.inner * mesh.outer);
  return path;
}

}  // namespace fsdp
