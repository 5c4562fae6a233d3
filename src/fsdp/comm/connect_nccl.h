// Collectives on GPUs by NCCL, for ranks that are processes with a GPU each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

// Whether this build has NCCL.
bool nccl_available();

// "2.28.9", of the library this process has loaded; "" without one.
std::string nccl_version();

// Memory on the current device that communicators can register (Communicator::register_memory). An
// Error when there is not enough, and in builds without NCCL.
void* nccl_allocate(int64_t bytes);
void nccl_deallocate(void* address) noexcept;

// A communicator of the same ranks whose tensors on GPUs travel by NCCL; everything else, and the
// meeting of the ranks, is left to `hosts`. The rank's GPU is the one of its number on this host.
// Every rank calls it. An Error in builds without NCCL.
std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator> hosts, int local_rank,
                                        const CommOptions& options);

}  // namespace fsdp
