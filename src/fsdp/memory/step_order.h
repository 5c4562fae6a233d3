// The order in which units compute during one step, and the live intervals ZeRO-3 makes of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

// Units in the order in which they compute. A unit may occur several times, e.g. an embedding that
// a multi-token-prediction head uses again.
struct StepOrder {
  std::vector<int32_t> forward;
  std::vector<int32_t> backward;
};

// Backward in the reverse order of forward: what autograd does with a chain.
StepOrder mirrored_order(std::vector<int32_t> forward);

// Every unit once, in the order of declaration, and back.
StepOrder declared_order(const BucketTable& table);

// Note [ZeRO-3 live intervals]
// Let S = forward followed by backward, and S[t] the unit that computes at time t. With depth k:
//   weights    of unit u are live at t when u is among S[t] .. S[t+k]: gathered k units ahead,
//              released after use. Neighbouring times join, so a unit that ends the forward and
//              starts the backward is not gathered twice;
//   gradients  of unit u are live at the last backward time t of u in the step and at t+1, when
//              its reduction ends. Earlier backward occurrences of u have none: autograd adds the
//              contributions of all uses before it hands a gradient over.
// One time more than S has units: the last reduction ends there. docs/memory.md has a picture.
//
// A prefetch more than one unit ahead may begin one unit later and still be hidden.
LiveTrace zero3_trace(const BucketTable& table, const StepOrder& order, int32_t prefetch);

}  // namespace fsdp
