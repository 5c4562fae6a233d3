// What is sharded: the placements of weights, gradients and optimizer state, by name or one by one.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "fsdp/layout/placement.h"

namespace fsdp {

// A strategy is data: whoever needs to know what to gather or to reduce compares placements, and
// nobody asks which strategy it is. Three placement lists of one's own are as good as a named row.
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

  // The same with the optimizer state also sharded over the outer axis (HFSDP). UsageError where
  // the inner axis does not shard it (no_shard).
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

}  // namespace fsdp
