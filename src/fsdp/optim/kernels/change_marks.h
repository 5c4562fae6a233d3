// Marks of changed weights: one bit per element, set by updates and read by patches.
//
// Elements are counted by their flat positions. A block of kScaleBlock elements has kMarkLanes
// numbers of 16 bits: bit j of number k is element 8 j + k, so that vectors of a CPU collect bits
// without moving them from lane to lane. Threads and warps take whole blocks, so nobody else writes
// the numbers that they change.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/layout/state_bytes.h"

namespace fsdp {

inline constexpr int64_t kMarkLanes = 8;
static_assert(kMarkLanes * 16 == kScaleBlock);

// Numbers of the blocks that a range touches.
inline int64_t num_mark_lanes(FlatRange flat) { return num_scales(flat) * kMarkLanes; }

// The first number of a position's block, in memory that begins with the block of `begin`.
constexpr int64_t first_mark_lane(int64_t begin, int64_t position) {
  return (position / kScaleBlock - begin / kScaleBlock) * kMarkLanes;
}

// Appends the marked ones of elements [flat) to `positions`, ascending. `marks` is memory that
// begins with the block of `begin`.
void find_marked(const uint16_t* marks, int64_t begin, FlatRange flat,
                 std::vector<int64_t>& positions);

}  // namespace fsdp
