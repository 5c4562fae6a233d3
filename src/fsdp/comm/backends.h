// How communicators between processes are made, one function for each of the backends `mpi`, `tcp`
// and `nccl`; and the calls that `nccl` alone has.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/launch.h"

namespace c10 {
class Stream;
}

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

// Connects processes that torch.distributed has brought together: they meet through its store,
// under a name that no earlier meeting had. Any number of worlds at a time.
std::unique_ptr<Communicator> connect_tcp_by_store(const Launch& launch, const CommOptions& options,
                                                   c10d::Store& store, const std::string& meeting);

// The result of both `mpi` and `tcp`: the communicator "world" of all ranks of the transport's job.
// Device tensors are staged through pinned memory.
std::unique_ptr<Communicator> communicator_over(std::shared_ptr<MessageTransport> transport,
                                                const CommOptions& options);

// --- nccl: ranks are processes with a GPU each ---

// Whether this build has NCCL.
bool nccl_available();

// "2.28.9", of the library this process has loaded; "" without one.
std::string nccl_version();

// How operations of each kind have used their callers' memory since that was registered: the worst
// of all of them.
using UsedBuffers = std::map<OpKind, UserBuffers>;

// How a communicator uses memory that was registered with it.
struct RegisteredMemory {
  UserBuffers use = UserBuffers::kOff;
  std::string why_not_better;  // "" where nothing better was asked for
};

// The calls of one communicator (Communicator::nccl()) that other backends do not have.
class NcclCalls {
 public:
  // Watches a replay of recorded operations that was just put on `stream`: the host does not see
  // the single operations, so the replay as a whole has the deadline of one of them, and
  // Communicator::throw_if_aborted() throws when it was missed.
  virtual void watch_replay(const c10::Stream& stream) = 0;

  // Registers memory that comes from nccl_allocate(), so that operations use it in place until
  // deregister_memory(), and no better than `best` says. Every rank calls it, in the same order and
  // with as many bytes.
  virtual RegisteredMemory register_memory(void* address, int64_t bytes, UserBuffers best) = 0;

  // Waits for the operations that use the memory, then ends its registration. Must be called before
  // the memory is released.
  virtual void deregister_memory(void* address) noexcept = 0;

  // How operations have used registered memory until now.
  virtual UsedBuffers used_buffers() const = 0;

 protected:
  ~NcclCalls() = default;
};

// Memory on the current device that communicators can register (NcclCalls::register_memory). An
// Error when there is not enough, and in builds without NCCL.
void* nccl_allocate(int64_t bytes);
void nccl_deallocate(void* address) noexcept;

// The identity of a GPU among all of its host: its PCI bus id. "" in builds
// without NCCL. (NCCL counts GPUs by this id, too; parts of one GPU have the same.)
std::string nccl_gpu_id(int device_index);

// A communicator of the same ranks whose tensors on GPUs travel by NCCL; everything else, and the
// meeting of the ranks, is left to `hosts`. The rank's GPU is gpu_of_rank(). Every rank
// calls it. An Error in builds without NCCL.
std::unique_ptr<Communicator> over_nccl(std::unique_ptr<Communicator> hosts, int local_rank,
                                        const CommOptions& options);

}  // namespace fsdp
