// Starts threads: an Error in words where the system gives no more of them.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

// `work` names what the thread is for: "rank 57 of 64", "collectives of 'world'".
template <typename Thread = std::thread, typename Body>
Thread start_thread(const std::string& work, Body body) {
  try {
    return Thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(concat("cannot start a thread for ", work, ": ", error.code().message(),
                       "; allow more processes (ulimit -u, or the container's limit), or run fewer "
                       "ranks on this host"));
  }
}

}  // namespace fsdp
