// How the copies of one flat buffer are spread over the two mesh axes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fsdp {

// What the ranks along one mesh axis hold of a buffer. Changing one axis is one step: Shard to
// Replicate is an all-gather, Partial to Shard a reduce-scatter, Partial to Replicate an
// all-reduce, Replicate to Shard a local view.
enum class Placement : uint8_t {
  kReplicate,  // everybody holds the whole range, with equal values
  kShard,      // everybody holds its own part of the range
  kPartial,    // everybody holds the whole range; the value is the sum over the ranks
};

// 'R', 'S' or 'P'.
char letter_of(Placement placement);

// One placement per mesh axis. A mesh without an outer axis has an outer size of 1, where the outer
// placement changes nothing.
struct PlacementPair {
  Placement outer = Placement::kReplicate;
  Placement inner = Placement::kReplicate;

  friend constexpr bool operator==(const PlacementPair&, const PlacementPair&) = default;
};

// Every combination, [R,R] first.
inline constexpr std::array<PlacementPair, 9> kAllPlacementPairs = {{
    {Placement::kReplicate, Placement::kReplicate},
    {Placement::kReplicate, Placement::kShard},
    {Placement::kReplicate, Placement::kPartial},
    {Placement::kShard, Placement::kReplicate},
    {Placement::kShard, Placement::kShard},
    {Placement::kShard, Placement::kPartial},
    {Placement::kPartial, Placement::kReplicate},
    {Placement::kPartial, Placement::kShard},
    {Placement::kPartial, Placement::kPartial},
}};

// Two letters, outer first: "RS".
std::string to_text(PlacementPair pair);

// The inverse of to_text; nullopt for anything else.
std::optional<PlacementPair> parse_placement_pair(std::string_view text);

// Ranks along each axis, or the coordinates of one rank.
struct MeshShape {
  int64_t outer = 1;
  int64_t inner = 1;
  // One rank along the inner axis exchanges with itself what several would exchange: to measure
  // what that costs where there is one device.
  bool talks_alone = false;

  constexpr bool communicates_outer() const { return outer > 1; }
  constexpr bool communicates_inner() const { return inner > 1 || talks_alone; }

  friend constexpr bool operator==(const MeshShape&, const MeshShape&) = default;
};
struct MeshCoordinate {
  int64_t outer = 0;
  int64_t inner = 0;

  friend constexpr bool operator==(const MeshCoordinate&, const MeshCoordinate&) = default;
};

// Into how many parts the buffer is cut: 1 for "RR", inner for "RS", inner * outer for "SS".
constexpr int64_t num_shards(PlacementPair pair, MeshShape mesh) {
  return (pair.outer == Placement::kShard ? mesh.outer : 1) *
         (pair.inner == Placement::kShard ? mesh.inner : 1);
}

// Whether its parts must be exchanged before it is whole.
constexpr bool is_exchanged(PlacementPair pair, MeshShape mesh) {
  return (pair.outer == Placement::kShard && mesh.communicates_outer()) ||
         (pair.inner == Placement::kShard && mesh.communicates_inner());
}

}  // namespace fsdp
