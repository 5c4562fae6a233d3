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

  friend constexpr bool operator==(const Strategy&, const Strategy&) = default;
};

// Four inner strategies (ZeRO-0 to 3), each with a replicated outer axis (HSDP; also what a mesh
// without outer axis uses), and those that shard something once more with the optimizer state also
// sharded over the outer axis (HFSDP):
//
//   name                       parameter  gradient  optimizer       (outer, inner)
//   no_shard                      R,R        P,P       R,R
//   optim                         R,R        P,P       R,S          ZeRO-1
//   optim_grads                   R,R        P,S       R,S          ZeRO-2
//   optim_grads_params            R,S        P,S       R,S          ZeRO-3
//   optim+hfsdp                   R,R        P,P       S,S
//   optim_grads+hfsdp             R,R        P,S       S,S
//   optim_grads_params+hfsdp      R,S        P,S       S,S
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
