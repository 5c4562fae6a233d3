// One arena for all buckets of a step: fixed offsets computed from live intervals.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/memory/arena/arena_sweep.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

struct ArenaPlannerOptions {
  // Every offset is a multiple of this; the flat layout pads to the same by default.
  int64_t alignment = 128;
  // Delays are for plans that miss the bound without them.
  PrefetchDelays delays = PrefetchDelays::kAllowed;
  // How far above the bound a plan may be before prefetches are delayed.
  double delay_above = 1.02;
  // Partial placements kept by the thorough sweeps (see arena_sweep.h).
  int32_t beam = 128;
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

  // Of the bound of the trace that was asked for; 1 is optimal without delays.
  double ratio() const;
};

// Tries placement orders first, then sweeps for smaller and smaller arenas, and stops at the lower
// bound. Deterministic: no clock and no random numbers, so all ranks plan alike.
ArenaPlan plan_arena(const LiveTrace& trace, const ArenaPlannerOptions& options = {});

// Throws InternalError when two intervals that are live at one time share a byte, or one lies
// outside the arena.
void check_plan(const ArenaPlan& plan);

}  // namespace fsdp
