// The order in which units compute during one step, and the live intervals ZeRO-3 makes of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

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
