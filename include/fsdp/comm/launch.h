// Who started this process, and which rank of how many it is: read from the environment alone.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace fsdp {

enum class Launcher { kSingle, kOpenMpi, kSlurm, kTorchrun };

// "a single process", "mpirun", "srun", "torchrun"
const char* name_of(Launcher launcher);

struct Launch {
  Launcher launcher = Launcher::kSingle;
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // rank among the processes of this host: chooses the GPU (gpu_of_rank)
  int local_size = 1;
  int gpu_ranks = 0;           // ranks that compute on this one's GPU; 0: nobody has counted them
  std::string master_address;  // where to meet; torchrun only
  int master_port = 0;
};

// The GPU on which a process computes, of the `num_visible` that it sees: the one of its local
// rank. Where it sees fewer they are taken in turn; so a process that sees its own GPU alone takes
// that.
int gpu_of_rank(int local_rank, int num_visible);

// Looks a variable up; nullopt when it is unset or empty.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;

// Reads the variables of Open MPI's mpirun, of Slurm's srun and of torchrun. Half-set or
// contradictory variables are an Error that names them.
//
// Several launchers may be visible at once. mpirun and torchrun inside a Slurm job inherit Slurm's
// variables, which then describe the daemon that started them, so both win over Slurm. A wrapper
// script may copy mpirun's rank into torchrun's RANK, so those two must agree.
Launch read_launch(const EnvironmentLookup& lookup);

// Reads them from this process's environment.
Launch read_launch();

}  // namespace fsdp
