// One arena for all buckets of a step: fixed offsets computed from live intervals.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
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
// For the rest of a step it matters only where the live intervals lie now. So the sweep goes
// through the times of the trace with a set of partial placements; each interval that begins is
// tried at both ends of every gap that takes it; placements that left the same live layout
// (also upside down) are one; and of the others the `beam` least fragmented survive. Stacks of
// similar units have so few distinct layouts that this is close to an exhaustive search.
struct SweepOutcome {
  // Nothing when none was found; that is no proof that there is none.
  std::optional<SweptPlacement> placement;
  int64_t num_decisions = 0;
};

SweepOutcome sweep_into_arena(const LiveTrace& trace, const SweepRequest& request);

struct ArenaPlannerOptions {
  // Every offset is a multiple of this; the flat layout pads to the same by default.
  int64_t alignment = 128;
  // Decisions of all sweeps together: bounds the time, with the same result on every machine.
  int64_t max_decisions = 500'000;
  // Offsets of a known placement, by interval: the plan is never larger. Empty for none.
  std::vector<int64_t> known_offsets = {};
};

// Where every stay of every bucket lies. Two stays of one bucket (forward and backward) may lie at
// different offsets; within a stay nothing moves, and every step is the same.
struct ArenaPlan {
  LiveTrace trace;               // as planned for: delayed prefetches begin later than asked
  std::vector<int64_t> offsets;  // by interval of `trace`
  int64_t arena_bytes = 0;
  int64_t bound_bytes = 0;          // most live bytes at one time, of the trace that was asked for
  int64_t delayed_bound_bytes = 0;  // the same of `trace`; differs only with delays
  int32_t num_delayed = 0;          // prefetches that begin one unit later
  std::string method;               // which of the searches found it

  // The share of the bound of the trace that was asked for; 1 is optimal without delays.
  double ratio() const;
};

// Begins with the known placement or with the largest first, sweeps for smaller and smaller arenas,
// and stops at the lower bound. No clock and no random numbers, so all ranks plan alike. No two
// intervals that are live at one time share a byte: an InternalError otherwise.
ArenaPlan plan_arena(const LiveTrace& trace, const ArenaPlannerOptions& options = {});

}  // namespace fsdp
