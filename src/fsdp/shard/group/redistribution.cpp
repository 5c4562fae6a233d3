#include "fsdp/shard/group/redistribution.h"

#include <ATen/ATen.h>

#include <array>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/layout/flat_layout.h"

namespace fsdp {

namespace {

constexpr PlacementPair kWhole{Placement::kReplicate, Placement::kReplicate};
constexpr PlacementPair kUnreduced{Placement::kPartial, Placement::kPartial};

Placement& along(PlacementPair& pair, Axis axis) {
  return axis == Axis::kInner ? pair.inner : pair.outer;
}

bool gathers(const PlacementStage& stage) { return stage.from() == Placement::kShard; }

// Elements of a segment that each rank along the stage's axis holds where it is cut.
std::vector<int64_t> share_counts(const FlatLayout& layout, const Segment& segment,
                                  MeshCoordinate rank, const PlacementStage& stage) {
  const bool is_inner = stage.axis == Axis::kInner;
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < (is_inner ? layout.mesh().inner : layout.mesh().outer); ++i) {
    (is_inner ? rank.inner : rank.outer) = i;
    counts.push_back(
        held_range(layout, segment, gathers(stage) ? stage.before : stage.after, rank).numel());
  }
  return counts;
}

}  // namespace

PlacementPath placement_path(PlacementPair from, PlacementPair to, MeshShape mesh) {
  constexpr std::array kReducing{Axis::kInner, Axis::kOuter};
  constexpr std::array kGathering{Axis::kOuter, Axis::kInner};
  const bool grows = num_shards(from, mesh) > num_shards(to, mesh);
  PlacementPath path;
  PlacementPair now = from;
  for (const Axis axis : grows ? kGathering : kReducing) {
    PlacementStage stage{.axis = axis, .before = now, .after = now};
    along(stage.after, axis) = along(to, axis);
    now = stage.after;
    const bool communicates =
        axis == Axis::kInner ? mesh.communicates_inner() : mesh.communicates_outer();
    if (communicates && stage.from() != stage.to()) path.push_back(stage);
  }
  return path;
}

GroupPaths group_paths(const Strategy& strategy, MeshShape mesh, GradientOf gradient,
                       int64_t num_losses, int64_t num_copies) {
  GroupPaths paths{.refresh = placement_path(strategy.optimizer, strategy.parameter, mesh),
                   .unshard = placement_path(strategy.parameter, kWhole, mesh),
                   .each_backward = placement_path(kUnreduced, strategy.gradient, mesh),
                   .cycle_end = placement_path(strategy.gradient, strategy.optimizer, mesh)};
  PlacementPath& first = paths.each_backward.empty() ? paths.cycle_end : paths.each_backward;
  const int64_t divisor = gradient == GradientOf::kMeanOverRanks ? num_losses : 1;
  (first.empty() ? paths.local_scale : first.front().scale) =
      1.0 / static_cast<double>(divisor * num_copies);
  return paths;
}

Redistribution::Redistribution(const FlatLayout& layout, const Grid& grid, MeshCoordinate rank,
                               PlacementPath path) {
  for (const PlacementStage& step : path) {
    const MeshAxis& axis = step.axis == Axis::kInner ? *grid.inner : *grid.outer;
    Stage& stage =
        stages_.emplace_back(Stage{step, gathers(step) ? &axis.gather() : &axis.reduce(), {}, {}});
    if (layout.padded_numel() == 0) continue;  // every rank knows that there is nothing to move
    for (const Segment& segment : layout.segments())
      stage.cuts.push_back(
          {held_range(layout, segment, step.before, rank),
           held_range(layout, segment, step.after, rank),
           segment.is_even() ? std::vector<int64_t>() : share_counts(layout, segment, rank, step)});
  }
}

void Redistribution::look_at(const FlatBuffer& source, const FlatBuffer& target) {
  if (source_.is_same(source.local()) && target_.is_same(target.local())) return;
  for (Stage& stage : stages_) {
    const bool is_first = &stage == &stages_.front();
    const bool is_last = &stage == &stages_.back();
    const bool grows = gathers(stage.step);
    const FlatBuffer& from = grows && !is_first ? target : source;
    const FlatBuffer& into =
        grows || (is_last && stage.step.to() == Placement::kShard) ? target : source;
    stage.transfers.clear();
    for (const Cut& cut : stage.cuts)
      stage.transfers.push_back({into.at(cut.after), from.at(cut.before)});
  }
  results_.clear();
  if (!stages_.empty() && stages_.back().step.to() == Placement::kReplicate)
    for (const Cut& cut : stages_.back().cuts) results_.push_back(target.at(cut.after));
  source_ = source.local();
  target_ = target.local();
}

Work Redistribution::start(const FlatBuffer& source, const FlatBuffer& target, const Tag& tag,
                           const Work& after, const Reduction& last) {
  look_at(source, target);
  Work before = after;
  for (const Stage& stage : stages_) {
    Reduction reduction = &stage == &stages_.back() ? last : Reduction{};
    reduction.scale = stage.step.scale;
    Work end = stage.cuts.empty() ? before : Work();
    for (size_t i = 0; i < stage.cuts.size(); ++i) {
      const auto& [output, input] = stage.transfers[i];
      const std::vector<int64_t>& counts = stage.cuts[i].counts;
      if (gathers(stage.step))
        end = stage.communicator->all_gather(output, input, tag, counts, before);
      else if (stage.step.to() == Placement::kShard)
        end = stage.communicator->reduce_scatter(output, input, reduction, tag, counts, before);
      else
        end = stage.communicator->all_reduce(output, reduction, tag, before);
    }
    before = std::move(end);
  }
  return before;
}

Work Redistribution::start_in_type_of(const FlatBuffer& wire, const FlatBuffer& buffer,
                                      const Tag& tag, const Work& after, const Reduction& last) {
  if (!communicates()) return after;
  stages_.front().communicator->copy(wire.local(), buffer.local(), tag, after);
  Work end = start(wire, buffer, tag, {}, last);
  // An all-reduce is in place, so its result lies in the copy.
  const Stage& stage = stages_.back();
  for (size_t i = 0; i < results_.size(); ++i)
    end = stage.communicator->copy(results_[i], stage.transfers[i].output, tag);
  return end;
}

}  // namespace fsdp
