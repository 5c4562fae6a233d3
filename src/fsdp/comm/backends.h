// How communicators between processes are made: one function for each of the backends `mpi`, `tcp`
// and `nccl`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/launch.h"

namespace c10d {
class Store;
}

namespace fsdp {

class MessageTransport;

// --- mpi: ranks are processes, possibly on several hosts, joined by Open MPI ---

// Whether this build has MPI.
bool mpi_available();

// Joins the processes that `launch` describes. An Error when this build has no MPI, or when MPI
// sees another number of processes than the launcher promised. One world per process and time.
std::unique_ptr<Communicator> connect_mpi(const Launch& launch, const CommOptions& options);

// --- tcp: ranks are processes, possibly on several hosts, started by torchrun ---

// Joins the processes that `launch` describes; they meet at its master address. FSDP_HOST_ADDRESS,
// where set, is the address at which the others reach this process. An Error when somebody does not
// come. One world per process and time.
std::unique_ptr<Communicator> connect_tcp(const Launch& launch, const CommOptions& options);

// The same for processes that torch.distributed has brought together: they meet through its store,
// under a name that no earlier meeting had. Any number of worlds at a time.
std::unique_ptr<Communicator> connect_tcp_by_store(const Launch& launch, const CommOptions& options,
                                                   c10d::Store& store, const std::string& meeting);

// What `mpi` and `tcp` both return: the communicator "world" of all ranks of the transport's job.
// Device tensors are staged through pinned memory.
std::unique_ptr<Communicator> communicator_over(std::shared_ptr<MessageTransport> transport,
                                                const CommOptions& options);

// --- nccl: ranks are processes with a GPU each ---

// Whether this build has NCCL.
bool nccl_available();

// "2.28.9", of the library this process has loaded; "" without one.
std::string nccl_version();

// Memory on the current device that communicators can register (Communicator::register_memory). An
// Error when there is not enough, and in builds without NCCL.
void* nccl_allocate(int64_t bytes);
void nccl_deallocate(void* address) noexcept;

// What tells a GPU that this process sees from all others of its host: its PCI bus id. "" in builds
// without NCCL. (NCCL counts GPUs by this id, too; parts of one GPU have the same.)
std::string nccl_gpu_id(int device_index);

// A communicator of the same ranks whose tensors on GPUs travel by NCCL; everything else, and the
// meeting of the ranks, is left to `hosts`. The rank's GPU is gpu_of_rank(). Every rank
// calls it. An Error in builds without NCCL.
std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator> hosts, int local_rank,
                                        const CommOptions& options);

}  // namespace fsdp
