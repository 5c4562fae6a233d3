// All ranks of a job, and how this one joined them: as a process, as a thread, or simulated.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/launch.h"
#include "fsdp/comm/mesh.h"

namespace c10d {
class Store;
}

namespace fsdp {

class Communicator;
struct RecordedCall;
using Recording = std::vector<RecordedCall>;  // operation.h

class World {
 public:
  // Joins the job this process was started in: mpirun and srun through MPI, torchrun through
  // TCP; without a launcher, a world of one rank. Rank 0 logs transport().
  static World from_environment(const CommOptions& options = CommOptions::from_environment());

  // Joins the processes that `place` describes, who meet through a store of torch.distributed
  // under the name `meeting`, which no earlier meeting had. A process may be in several such
  // worlds.
  static World from_store(c10d::Store& store, const Launch& place, const std::string& meeting,
                          const CommOptions& options = CommOptions::from_environment());

  // Rank `rank` of `size`, alone: nothing moves, every call is recorded.
  static World simulated(int rank, int size, std::shared_ptr<Recording> recording,
                         const CommOptions& options = {});

  World(Launch launch, std::unique_ptr<Communicator> communicator, std::string transport = "");
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  int rank() const;
  int size() const;
  int local_rank() const { return launch_.local_rank; }
  const Launch& launch() const { return launch_; }

  // How tensors travel between processes, and why: "tensors travel by NCCL: 8 ranks on 2 hosts,
  // each with a GPU of its own". "" where none do.
  const std::string& transport() const { return transport_; }

  // Everybody; for what concerns the whole job (barriers, the gradient norm).
  Communicator& communicator() { return *communicator_; }

  Mesh mesh(const MeshOptions& options = {}) { return Mesh(*communicator_, options); }

 private:
  Launch launch_;
  std::string transport_;
  std::unique_ptr<Communicator> communicator_;
};

// Runs `body` once per rank, each in a thread of this process, and returns when all are done. If
// one throws, the others' waits fail with its message, and its error is thrown here. Autograd runs
// backward in the calling thread of each rank: ranks share the engine's device threads otherwise,
// and a hook that waits for another rank would deadlock.
void run_threads(int ranks, const CommOptions& options, const std::function<void(World&)>& body);

}  // namespace fsdp
