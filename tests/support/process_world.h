// The world of a test that a launcher started as several processes.
#pragma once

#include <memory>

#include "fsdp/comm/backends.h"
#include "fsdp/comm/world.h"

namespace fsdp::testing {

// Unlike World::from_environment, uses the launcher's backend for one rank, too.
inline std::unique_ptr<Communicator> connect_processes(const CommOptions& options) {
  const Launch launch = read_launch();
  const bool by_tcp = launch.launcher == Launcher::kTorchrun;
  return by_tcp ? connect_tcp(launch, options) : connect_mpi(launch, options);
}

inline World join_processes(const CommOptions& options) {
  return World(read_launch(), connect_processes(options));
}

}  // namespace fsdp::testing
