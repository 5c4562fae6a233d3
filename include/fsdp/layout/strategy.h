// A strategy says what is sharded: how the copies of one buffer are spread over the two mesh axes,
// and the strategies (placements of weights, gradients and optimizer state), by name or one by one;
// and where a shard may end: the cuts through a tensor that a layout is allowed to make.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp {

// The part of a buffer that the ranks along one mesh axis hold. Changing one axis is one step:
// Shard to Replicate is an all-gather, Partial to Shard a reduce-scatter, Partial to Replicate an
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
  bool force_collectives = false;

  constexpr bool communicates_outer() const { return outer > 1; }
  constexpr bool communicates_inner() const { return inner > 1 || force_collectives; }

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

// A strategy is data. Code that gathers or reduces compares placements, and never asks which
// strategy it is. Three placement lists of one's own are as good as a named row.
struct Strategy {
  std::string_view name = "custom";  // of a row of named_strategies(), else "custom"
  PlacementPair parameter = {};      // weights between their uses
  PlacementPair gradient = {};       // main gradients while they accumulate
  PlacementPair optimizer = {};      // main weights and moments

  // The four inner strategies (ZeRO-0 to 3) with a replicated outer axis: HSDP, and what a mesh
  // without outer axis uses.
  static const Strategy no_shard;
  static const Strategy optim;
  static const Strategy optim_grads;
  static const Strategy optim_grads_params;

  // This strategy with the optimizer state also sharded over the outer axis (HFSDP). UsageError
  // where the inner axis does not shard it (no_shard).
  Strategy hfsdp() const;

  friend constexpr bool operator==(const Strategy&, const Strategy&) = default;
};

// The outer gradient placement is always Partial: gradients cross the outer axis once per step,
// when the last microbatch is done, and not once per backward.
//
//                                     parameter  gradient  optimizer       (outer, inner)
//   no_shard                             R,R        P,P       R,R
//   optim                                R,R        P,P       R,S          ZeRO-1
//   optim_grads                          R,R        P,S       R,S          ZeRO-2
//   optim_grads_params                   R,S        P,S       R,S          ZeRO-3
//   each of the last three + hfsdp                            S,S
inline constexpr Strategy Strategy::no_shard{
    .name = "no_shard",
    .parameter = {Placement::kReplicate, Placement::kReplicate},
    .gradient = {Placement::kPartial, Placement::kPartial},
    .optimizer = {Placement::kReplicate, Placement::kReplicate}};
inline constexpr Strategy Strategy::optim{
    .name = "optim",
    .parameter = {Placement::kReplicate, Placement::kReplicate},
    .gradient = {Placement::kPartial, Placement::kPartial},
    .optimizer = {Placement::kReplicate, Placement::kShard}};
inline constexpr Strategy Strategy::optim_grads{
    .name = "optim_grads",
    .parameter = {Placement::kReplicate, Placement::kReplicate},
    .gradient = {Placement::kPartial, Placement::kShard},
    .optimizer = {Placement::kReplicate, Placement::kShard}};
inline constexpr Strategy Strategy::optim_grads_params{
    .name = "optim_grads_params",
    .parameter = {Placement::kReplicate, Placement::kShard},
    .gradient = {Placement::kPartial, Placement::kShard},
    .optimizer = {Placement::kReplicate, Placement::kShard}};

// The four, and "optim+hfsdp", "optim_grads+hfsdp", "optim_grads_params+hfsdp".
std::span<const Strategy> named_strategies();

// A name of the table, the same followed by "+hsdp" (the plain row), or three placement pairs for
// parameter, gradient and optimizer such as "RS/PS/SS". UsageError for an unknown or illegal one.
Strategy parse_strategy(std::string_view text);

// The table's name, or the three pairs: "RS/PP/SS".
std::string to_text(const Strategy& strategy);

// Why the engine cannot run these placements, as a sentence; nullopt when it can.
std::optional<std::string> illegal_reason(const Strategy& strategy);

// UsageError with illegal_reason().
void check_legal(const Strategy& strategy);

// Made by the four functions below.
struct Granularity {
  enum class Kind : uint8_t {
    kElement,  // anywhere
    kRow,      // between two rows, i.e. between two indices of dim 0
    kBlock,    // between two blocks of block_numel elements, counted from the tensor's start
    kTensor,   // nowhere: every tensor has one owner
  };
  Kind kind = Kind::kElement;
  int64_t block_numel = 1;  // of kBlock

  static constexpr Granularity element() { return {}; }
  static constexpr Granularity row() { return {.kind = Kind::kRow}; }
  static constexpr Granularity block(int64_t numel) {
    return {.kind = Kind::kBlock, .block_numel = numel};
  }
  static constexpr Granularity tensor() { return {.kind = Kind::kTensor}; }

  friend constexpr bool operator==(const Granularity&, const Granularity&) = default;
};

// "element", "row", "block(128)", "tensor".
std::string to_text(Granularity granularity);

// The inverse of to_text; UsageError for anything else.
Granularity parse_granularity(std::string_view text);

// The smallest number of elements of a tensor that must stay together (the last one of a tensor may
// be shorter): 1, a row, a block, or the whole tensor. Scalars and vectors have rows of 1 element.
int64_t indivisible_numel(Granularity granularity, std::span<const int64_t> shape);

}  // namespace fsdp
