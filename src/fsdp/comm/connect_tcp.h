// The `tcp` backend: ranks are processes, possibly on several hosts, started by torchrun.
#pragma once

#include <memory>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/launch.h"

namespace fsdp {

// Joins the processes that `launch` describes; they meet at its master address. FSDP_HOST_ADDRESS,
// where set, is the address at which the others reach this process. An Error when somebody does not
// come. One world per process and time.
std::unique_ptr<Communicator> connect_tcp(const Launch& launch, const CommOptions& options);

}  // namespace fsdp
