// Lets one process of a job say what all of them find.
#pragma once

#include <chrono>
#include <thread>

#include "fsdp/base/error.h"
#include "fsdp/comm/launch.h"

namespace fsdp::cli {

// Every process of a job finds the same mistake. The first one says it; the launcher then ends the
// others, which come to speak only if theirs was another.
template <typename Action>
auto let_the_first_speak(const Launch& launch, const Action& action) {
  try {
    return action();
  } catch (const Error&) {
    if (launch.rank > 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    throw;
  }
}

}  // namespace fsdp::cli
