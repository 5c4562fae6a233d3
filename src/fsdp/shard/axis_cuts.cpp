#include "fsdp/shard/axis_cuts.h"

#include "fsdp/layout/shard_pieces.h"

namespace fsdp {

namespace {

constexpr PlacementPair kWhole{Placement::kReplicate, Placement::kReplicate};
constexpr PlacementPair kInnerPart{Placement::kReplicate, Placement::kShard};
constexpr PlacementPair kOuterPart{Placement::kShard, Placement::kShard};

}  // namespace

AxisCuts::AxisCuts(const FlatLayout& layout, MeshCoordinate rank) {
  for (const Segment& segment : layout.segments()) {
    const auto held = [&](PlacementPair placed, MeshCoordinate who) {
      return held_range(layout, segment, placed, who);
    };
    AxisCut inner{held(kWhole, rank), held(kInnerPart, rank), {}};
    AxisCut outer{held(kInnerPart, rank), held(kOuterPart, rank), {}};
    if (!segment.is_even()) {
      for (int64_t other = 0; other < layout.mesh().inner; ++other)
        inner.counts.push_back(held(kInnerPart, {.outer = rank.outer, .inner = other}).numel());
      for (int64_t other = 0; other < layout.mesh().outer; ++other)
        outer.counts.push_back(held(kOuterPart, {.outer = other, .inner = rank.inner}).numel());
    }
    cuts_[static_cast<size_t>(Axis::kInner)].push_back(std::move(inner));
    cuts_[static_cast<size_t>(Axis::kOuter)].push_back(std::move(outer));
  }
}

}  // namespace fsdp
