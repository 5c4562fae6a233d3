// Memory that is registered with a backend asks more of a pool.
#pragma once

#include "fsdp/comm/comm_options.h"
#include "fsdp/memory/pool_options.h"

namespace fsdp {

// The memory of units unlike the most common one, in a double buffer. Registered memory stays: to
// allocate and free it around each use would register it anew in every step, which all ranks wait
// for.
constexpr OtherUnits other_units_with(UserBuffers user_buffers, OtherUnits asked) {
  return user_buffers == UserBuffers::kOff ? asked : OtherUnits::kPersistent;
}

}  // namespace fsdp
