// The `mpi` backend: ranks are processes, possibly on several hosts, joined by Open MPI.
#pragma once

#include <memory>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/launch.h"

namespace fsdp {

// Whether this build has MPI.
bool mpi_available();

// Joins the processes that `launch` describes. An Error when this build has no MPI, or when MPI
// sees another number of processes than the launcher promised. One world per process and time.
std::unique_ptr<Communicator> connect_mpi(const Launch& launch, const CommOptions& options);

}  // namespace fsdp
