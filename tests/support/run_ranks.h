// Runs a test body on thread ranks, with every check of the communicators on.
#pragma once

#include <functional>

#include "fsdp/comm/world.h"

namespace fsdp::testing {

inline void run_ranks(int ranks, const std::function<void(World&)>& body) {
  run_threads(ranks, {.timeout_seconds = 60.0, .checked = true}, body);
}

}  // namespace fsdp::testing
