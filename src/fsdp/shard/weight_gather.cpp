#include "fsdp/shard/weight_gather.h"

#include <ATen/ATen.h>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

const MeshAxis& mesh_axis(const Mesh& mesh, Axis axis) {
  return axis == Axis::kInner ? mesh.inner() : mesh.outer();
}

Placement along(PlacementPair pair, Axis axis) {
  return axis == Axis::kInner ? pair.inner : pair.outer;
}

// Outer first: the outer whole is the inner part.
constexpr Axis kGatherOrder[] = {Axis::kOuter, Axis::kInner};

constexpr PlacementPair kWhole{Placement::kReplicate, Placement::kReplicate};

}  // namespace

WeightGather::WeightGather(const FlatLayout& layout, const AxisCuts& cuts, const Strategy& strategy,
                           const Mesh& mesh, MeshShape shape, const FlatBuffer& weight)
    : layout_(layout),
      cuts_(cuts),
      mesh_(mesh),
      shape_(shape),
      weight_(weight),
      parameter_(strategy.parameter),
      optimizer_(strategy.optimizer) {
  for (const Axis axis : kGatherOrder) {
    refreshes_ |= gathers(optimizer_, parameter_, axis);
    unshards_ |= gathers(parameter_, kWhole, axis);
  }
}

bool WeightGather::gathers(PlacementPair from, PlacementPair to, Axis axis) const {
  const bool communicates =
      axis == Axis::kInner ? shape_.communicates_inner() : shape_.communicates_outer();
  return communicates && along(from, axis) == Placement::kShard &&
         along(to, axis) == Placement::kReplicate;
}

WeightGather::Stage WeightGather::stage_of(Axis axis, const auto& output_at,
                                           const auto& input_at) const {
  Stage stage;
  for (const AxisCut& cut : cuts_.along(axis))
    stage.push_back(
        {&mesh_axis(mesh_, axis).gather(), output_at(cut.whole), input_at(cut.part), cut.counts});
  return stage;
}

void WeightGather::build_refresh() {
  const auto in_weight = [&](FlatRange range) { return weight_.at(range); };
  for (const Axis axis : kGatherOrder)
    if (gathers(optimizer_, parameter_, axis))
      refresh_.push_back(stage_of(axis, in_weight, in_weight));
}

void WeightGather::build_unshard(void* slab) {
  const at::Tensor whole =
      tensor_over(slab, layout_.padded_numel(), weight_.dtype(), weight_.spec().device);
  const auto in_slab = [&](FlatRange range) { return whole.narrow(0, range.begin, range.numel()); };
  const auto in_weight = [&](FlatRange range) { return weight_.at(range); };
  unshard_.clear();
  for (const Axis axis : kGatherOrder) {
    if (!gathers(parameter_, kWhole, axis)) continue;
    // The second stage continues in place where the first one wrote.
    unshard_.push_back(unshard_.empty() ? stage_of(axis, in_slab, in_weight)
                                        : stage_of(axis, in_slab, in_slab));
  }
  unshard_slab_ = slab;
}

Work WeightGather::run(const std::vector<Stage>& stages, const Tag& tag, Work after) {
  for (const Stage& stage : stages) {
    Work last;
    for (const Step& step : stage)
      last = step.communicator->all_gather(step.output, step.input, tag, step.counts, after);
    after = last;
  }
  return after;
}

Work WeightGather::start(void* slab, Refresh refresh, const Tag& tag, Work after) {
  Work last = std::move(after);
  if (refresh == Refresh::kYes) {
    if (refresh_.empty()) build_refresh();
    last = run(refresh_, tag, last);
  }
  if (!unshards_) return last;
  FSDP_ASSERT(slab != nullptr || layout_.padded_numel() == 0);
  if (layout_.padded_numel() == 0) return last;
  if (slab != unshard_slab_) build_unshard(slab);
  return run(unshard_, tag, last);
}

}  // namespace fsdp
