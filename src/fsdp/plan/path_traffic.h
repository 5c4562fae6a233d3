// The bytes that a rank receives when a buffer goes from one placement to another.
#pragma once

#include <cstdint>

#include "fsdp/layout/strategy.h"
#include "fsdp/plan/forecast.h"

namespace fsdp {

AxisTraffic& add(AxisTraffic& sum, const AxisTraffic& other);

// One axis of so many ranks; the buffer holds `bytes` when whole along it.
AxisTraffic axis_traffic(Placement from, Placement to, int64_t bytes, int64_t num_ranks);

// Both axes of a grid, in Traffic::inner and Traffic::outer. A gather widens outer then inner, a
// reduction narrows inner then outer, so that the outer axis always sees the smaller buffer.
Traffic path_traffic(PlacementPair from, PlacementPair to, int64_t bytes, MeshShape mesh);

}  // namespace fsdp
