// How the ranks of an NCCL communicator find each other, with an end to the waiting.
#pragma once

#include <c10/core/Device.h>
#include <nccl.h>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

// A communicator of the ranks of `hosts`, connected to all of them, so that later launches wait for
// nobody. A TimeoutError when one does not come within the deadline; another rank's failure as soon
// as it is known. Every rank calls it, with rank 0's id.
ncclComm_t meet_over_nccl(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
                          const CommOptions& options);

// A CommError with NCCL's words, that names what failed.
[[noreturn]] void throw_nccl_error(ncclResult_t result, const std::string& doing);

}  // namespace fsdp
