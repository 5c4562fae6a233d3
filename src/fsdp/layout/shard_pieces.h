// Where a finer placement's shard lies inside a coarser one's: the optimizer's part of a gradient.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/layout/flat_layout.h"

namespace fsdp {

struct ShardPiece {
  FlatRange flat;            // in the unsharded buffer
  int64_t coarse_begin = 0;  // in the rank's part under the coarse placement
  int64_t fine_begin = 0;    // in the rank's part under the fine placement

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

// One piece per contiguous run, in the order of the fine shard. Everything `fine` leaves to the
// rank must be part of what `coarse` leaves to it.
std::vector<ShardPiece> shard_pieces(const FlatLayout& layout, PlacementPair coarse,
                                     PlacementPair fine, MeshCoordinate rank);

// Where flat position `flat_begin`, which the rank holds under `placed`, lies in its part.
int64_t local_position(const FlatLayout& layout, PlacementPair placed, MeshCoordinate rank,
                       int64_t flat_begin);

// The part of a segment that a rank holds under a placement ("RR" all of it, "RS" an inner share,
// "SS" an outer share of that).
FlatRange held_range(const FlatLayout& layout, const Segment& segment, PlacementPair placed,
                     MeshCoordinate rank);

}  // namespace fsdp
