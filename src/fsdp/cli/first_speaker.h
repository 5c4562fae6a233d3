// Lets one process of a job say what all of them find.
#pragma once

#include <chrono>
#include <thread>

#include "fsdp/base/error.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/launch.h"

namespace fsdp::cli {

// In which a launcher ends a job that has failed. Open MPI takes 1 to 2.3 s from the first process
// that ends to SIGKILL for the others.
constexpr std::chrono::seconds kMomentForLauncher{4};

// Every process of a job finds the same mistake. The first one says it; the launcher then ends the
// others, which come to speak only if theirs was another.
template <typename Action>
auto let_the_first_speak(const Launch& launch, const Action& action) {
  try {
    return action();
  } catch (const Error&) {
    if (launch.rank > 0) std::this_thread::sleep_for(kMomentForLauncher);
    throw;
  }
}

// What makes one process fail reaches the others, which would repeat its words: the same again. A
// deadline is missed by those who waited, so they are the ones to say it.
template <typename Action>
void let_the_failed_speak(const Action& action) {
  try {
    action();
  } catch (const TimeoutError&) {
    throw;
  } catch (const CommError&) {
    std::this_thread::sleep_for(kMomentForLauncher);
    throw;
  }
}

}  // namespace fsdp::cli
