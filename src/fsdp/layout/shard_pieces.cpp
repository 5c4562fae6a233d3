#include "fsdp/layout/shard_pieces.h"

#include "fsdp/base/error.h"

namespace fsdp {

int64_t local_position(const FlatLayout& layout, PlacementPair placed, MeshCoordinate rank,
                       int64_t flat_begin) {
  for (const ShardRange& range : layout.shard_ranges(placed, rank))
    if (range.flat.begin <= flat_begin && flat_begin < range.flat.end)
      return range.local_begin + flat_begin - range.flat.begin;
  FSDP_ASSERT(false, "element ", flat_begin, " is not in the rank's part");
  return 0;
}

std::vector<ShardPiece> shard_pieces(const FlatLayout& layout, PlacementPair coarse,
                                     PlacementPair fine, MeshCoordinate rank) {
  std::vector<ShardPiece> pieces;
  for (const ShardRange& range : layout.shard_ranges(fine, rank))
    pieces.push_back(
        {range.flat, local_position(layout, coarse, rank, range.flat.begin), range.local_begin});
  return pieces;
}

FlatRange held_range(const FlatLayout& layout, const Segment& segment, PlacementPair placed,
                     MeshCoordinate rank) {
  const int64_t outer_ranks = layout.mesh().outer;
  const int64_t num_shares = outer_ranks * layout.mesh().inner;
  if (placed.inner != Placement::kShard) return segment.shares(0, num_shares);
  const int64_t first = rank.inner * outer_ranks;
  if (placed.outer != Placement::kShard) return segment.shares(first, first + outer_ranks);
  return segment.shares(first + rank.outer, first + rank.outer + 1);
}

}  // namespace fsdp
