// All ranks of a job, and how this one joined them: as a process, as a thread, or simulated.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/launch.h"
#include "fsdp/comm/mesh.h"

namespace fsdp {

struct RecordedCall {
  std::string communicator;
  int ranks = 0;
  Fingerprint print;
};

// Shared by a simulated communicator and everything split from it, in the order of the calls.
using Recording = std::vector<RecordedCall>;

// The `simulated` backend: a world of any size seen from one rank; moves nothing, records every
// call. Checks arguments like every backend, so a dry run finds wrong sizes; outputs stay as they
// are.
class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(int rank, int size, std::string name, std::shared_ptr<Recording> recording);

  std::unique_ptr<Communicator> split(std::span<const int> colors, std::string name) override;
  void abort(const std::string& message) override;

 private:
  Work enqueue(Operation operation) override;

  const std::shared_ptr<Recording> recording_;
  uint64_t next_sequence_ = 0;
};

class World {
 public:
  // Joins the job this process was started in: mpirun and srun through MPI, torchrun through
  // TCP; without a launcher, a world of one rank.
  static World from_environment(const CommOptions& options = CommOptions::from_environment());

  // Rank `rank` of `size`, alone: nothing moves, every call is recorded.
  static World simulated(int rank, int size, std::shared_ptr<Recording> recording);

  World(Launch launch, std::unique_ptr<Communicator> communicator);

  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }
  int local_rank() const { return launch_.local_rank; }
  const Launch& launch() const { return launch_; }

  // Everybody; for what concerns the whole job (barriers, the gradient norm).
  Communicator& communicator() { return *communicator_; }

  Mesh mesh(const MeshOptions& options = {}) { return Mesh(*communicator_, options); }

 private:
  Launch launch_;
  std::unique_ptr<Communicator> communicator_;
};

// Runs `body` once per rank, each in a thread of this process, and returns when all are done. If
// one throws, the others' waits fail with its message, and its error is thrown here. Autograd runs
// backward in the calling thread of each rank: ranks share the engine's device threads otherwise,
// and a hook that waits for another rank would deadlock.
void run_threads(int ranks, const CommOptions& options, const std::function<void(World&)>& body);

}  // namespace fsdp
