// How the segments of a layout are cut along each mesh axis, as the ranges collectives work on.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/shard/reduction_path.h"

namespace fsdp {

// One segment along one axis: a gather goes from everybody's part to the whole, a reduction from
// the whole to everybody's part. The whole of the outer axis is the part of the inner one.
struct AxisCut {
  FlatRange whole;
  FlatRange part;               // this rank's
  std::vector<int64_t> counts;  // elements of every rank's part; empty when all are equal
};

class AxisCuts {
 public:
  AxisCuts(const FlatLayout& layout, MeshCoordinate rank);

  // One cut per segment.
  const std::vector<AxisCut>& along(Axis axis) const { return cuts_[static_cast<size_t>(axis)]; }

 private:
  std::array<std::vector<AxisCut>, 2> cuts_;
};

}  // namespace fsdp
