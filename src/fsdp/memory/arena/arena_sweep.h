// Fits live intervals into an arena of given height by sweeping over time, many partial placements
// side by side.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/memory/live_trace.h"

namespace fsdp {

// Whether a prefetch may begin later than the trace says (LiveInterval::may_begin_later).
enum class PrefetchDelays { kForbidden, kAllowed };

struct SweepRequest {
  // Height of the arena everything must fit into.
  int64_t arena_bytes = 0;
  // Partial placements kept after every decision: more find more and take longer.
  int32_t beam = 64;
  PrefetchDelays delays = PrefetchDelays::kForbidden;
  // Decisions after which it gives up. A count and not a time, so that every rank and every run
  // finds the same placement.
  int64_t max_decisions = 1'000'000;
};

struct SweptPlacement {
  std::vector<int64_t> offsets;  // by interval of the trace
  std::vector<int32_t> firsts;   // when each begins: the trace's own time, or later where delayed
  int32_t num_delayed = 0;       // groups that begin later
};

// Note [Sweep over time]
// What matters for the rest of a step is only where the live intervals lie now. So the sweep goes
// through the times of the trace with a set of partial placements; each interval that begins is
// tried at both ends of every gap that takes it; placements that left the same live layout
// (also upside down) are one; and of the others the `beam` least fragmented survive. Stacks of
// similar units have so few distinct layouts that this is close to an exhaustive search, where
// placing intervals one by one in any fixed order is up to 1.5 x above the bound.
//
struct SweepOutcome {
  // Nothing when none was found; that is no proof that there is none.
  std::optional<SweptPlacement> placement;
  int64_t num_decisions = 0;
};

SweepOutcome sweep_into_arena(const LiveTrace& trace, const SweepRequest& request);

}  // namespace fsdp
