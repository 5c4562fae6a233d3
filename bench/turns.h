// Times contenders on all ranks at once.
#pragma once

#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "timings.h"

namespace bench {

// All ranks call it with as many contenders; a turn lasts from when all ranks have begun until all
// have ended.
inline Timings take_turns(fsdp::World& world, const std::vector<Contender>& contenders,
                          const Turns& turns) {
  return take_turns(contenders, turns, [&] { world.communicator().barrier("bench").wait(); });
}

}  // namespace bench
