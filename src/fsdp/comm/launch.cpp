#include "fsdp/comm/launch.h"

#include <charconv>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"

namespace fsdp {

namespace {

// The names under which one launcher tells a process its place.
struct Names {
  Launcher launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;  // nullptr: the launcher does not say it in a plain number
};

constexpr Names kOpenMpi = {Launcher::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kTorchrun = {Launcher::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE"};
constexpr Names kSlurm = {Launcher::kSlurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                          nullptr};

int whole_number(const EnvironmentLookup& lookup, const char* name) {
  const std::string text = lookup(name).value();
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  FSDP_CHECK(error == std::errc() && stop == text.data() + text.size() && value >= 0,
             "environment variable ", name, " is '", text, "': it must be a whole number from 0");
  return value;
}

void check_rank(const char* rank_name, int rank, const char* size_name, int size) {
  FSDP_CHECK(rank < size, "environment variables ", rank_name, "=", rank, " and ", size_name, "=",
             size, " contradict each other: the rank must be below the size");
}

// nullopt when none of the launcher's variables is set.
std::optional<Launch> read_names(const EnvironmentLookup& lookup, const Names& names) {
  std::vector<std::string> present;
  std::vector<std::string> missing;
  for (const char* name : {names.rank, names.size, names.local_rank})
    (lookup(name) ? present : missing).push_back(name);
  if (present.empty()) return std::nullopt;
  FSDP_CHECK(missing.empty(), "the environment of ", name_of(names.launcher),
             " is half set: ", join(present, ", "), " without ", join(missing, ", "),
             "; set them all, or unset them to run a single process");

  Launch launch;
  launch.launcher = names.launcher;
  launch.rank = whole_number(lookup, names.rank);
  launch.size = whole_number(lookup, names.size);
  launch.local_rank = whole_number(lookup, names.local_rank);
  check_rank(names.rank, launch.rank, names.size, launch.size);
  launch.local_size = launch.size;
  if (names.local_size != nullptr && lookup(names.local_size)) {
    launch.local_size = whole_number(lookup, names.local_size);
    check_rank(names.local_rank, launch.local_rank, names.local_size, launch.local_size);
    check_rank(names.local_size, launch.local_size - 1, names.size, launch.size);
  }
  return launch;
}

void read_master(const EnvironmentLookup& lookup, Launch& launch) {
  const auto address = lookup("MASTER_ADDR");
  const auto port = lookup("MASTER_PORT");
  FSDP_CHECK(address && port, "the environment of torchrun is half set: RANK without ",
             address ? "MASTER_PORT" : "MASTER_ADDR", "; start the job with torchrun, or set both");
  launch.master_address = *address;
  launch.master_port = whole_number(lookup, "MASTER_PORT");
  FSDP_CHECK(launch.master_port > 0 && launch.master_port < 65536, "environment variable ",
             "MASTER_PORT is '", *port, "': it must be a port from 1 to 65535");
}

}  // namespace

const char* name_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::kSingle:
      return "a single process";
    case Launcher::kOpenMpi:
      return "mpirun";
    case Launcher::kSlurm:
      return "srun";
    case Launcher::kTorchrun:
      return "torchrun";
  }
  FSDP_ASSERT(false, "launcher ", static_cast<int>(launcher));
}

Launch read_launch(const EnvironmentLookup& lookup) {
  const std::optional<Launch> mpi = read_names(lookup, kOpenMpi);
  std::optional<Launch> torchrun = read_names(lookup, kTorchrun);
  if (mpi && torchrun) {
    FSDP_CHECK(mpi->rank == torchrun->rank && mpi->size == torchrun->size,
               "mpirun and torchrun variables contradict each other: OMPI_COMM_WORLD_RANK=",
               mpi->rank, " of OMPI_COMM_WORLD_SIZE=", mpi->size, ", but RANK=", torchrun->rank,
               " of WORLD_SIZE=", torchrun->size, "; unset those of the launcher you do not use");
  }
  if (mpi) return *mpi;
  if (torchrun) {
    read_master(lookup, *torchrun);
    return *torchrun;
  }
  // A batch script outside srun has SLURM_PROCID=0 and SLURM_NTASKS of the whole job, yet is one
  // process; only a step (srun) has SLURM_STEP_ID.
  if (lookup("SLURM_STEP_ID")) {
    if (const std::optional<Launch> slurm = read_names(lookup, kSlurm)) return *slurm;
  }
  return Launch{};
}

Launch read_launch() { return read_launch(&env_text); }

}  // namespace fsdp
