// Which buckets are live when, over one training step, and the order of units from which that
// follows: what the planned pool is computed from.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/memory/bucket.h"

namespace fsdp {

// One stay of a bucket in memory. Times are counted in computed units: at time t the t-th unit of
// the step computes. Both ends are included.
struct LiveInterval {
  BucketId bucket;
  int64_t bytes = 0;
  int32_t first = 0;
  int32_t last = 0;
  // A prefetch that is still hidden behind computation when it begins one time later.
  bool may_begin_later = false;
  // Intervals of one unit that are acquired by one call share a group and begin together.
  int32_t group = -1;
};

// The stays of one step in the order in which they are acquired. The n-th stay of a bucket in here
// is its n-th acquire in a step.
struct LiveTrace {
  std::vector<LiveInterval> intervals;
  int32_t num_times = 0;
  int32_t prefetch = 0;  // the depth it was built for
};

// Live bytes at every time of the step.
std::vector<int64_t> live_bytes(const LiveTrace& trace);

// No placement can be smaller than the most bytes live at one time.
int64_t lower_bound_bytes(const LiveTrace& trace);

// Most units of which something of this role is live at one time: what a pool with slots needs.
int32_t most_live_units(const LiveTrace& trace, const BucketTable& table, BucketRole role);

// Units in the order in which they begin to compute. A unit may occur several times, e.g. an
// embedding that a multi-token-prediction layer uses again.
struct StepOrder {
  std::vector<int32_t> forward;
  std::vector<int32_t> backward;
  // A use may begin while another one still computes (the layer calls the embedding itself). By
  // use of forward followed by backward: the last time at which it still computes, at least its
  // own. Uses are nested like calls. Empty: every use ends before the next begins.
  std::vector<int32_t> ends = {};
};

// Backward in the reverse order of forward, what autograd does with a chain: the use that ended
// last begins first. `ends` is that of the forward, or empty.
StepOrder mirrored_order(std::vector<int32_t> forward, std::vector<int32_t> ends = {});

// Every unit once, in the order of declaration, and back.
StepOrder declared_order(const BucketTable& table);

// Note [ZeRO-3 live intervals]
// Let S = forward followed by backward, S[t] the unit that begins at time t, and A(t) the units
// that compute at t: S[t], and those it is nested in. With depth k:
//   weights    of unit u are live at t when u is in A(t), or among the next k + 1 - |A(t)| of
//              S[t+1], S[t+2], ..: gathered ahead, released after use. Neighbouring times join, so
//              a unit that ends the forward and starts the backward is not gathered twice;
//   gradients  of unit u are live from the last backward time of u in the step until one time after
//              its backward ended, when its reduction ends. Earlier backward occurrences of u have
//              none: autograd adds the contributions of all uses before it hands a gradient over.
// So without nesting weights are live from k units ahead to their use, and no more than k + 1 units
// at once; a nested use takes the place of a prefetch, and only uses nested deeper than k need more
// than k + 1. One time more than S has units: the last reduction ends there. docs/memory.md has
// pictures.
//
// A prefetch more than one unit ahead may begin one unit later and still be hidden.
LiveTrace zero3_trace(const BucketTable& table, const StepOrder& order, int32_t prefetch);

}  // namespace fsdp
