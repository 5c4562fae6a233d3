#include "fsdp/comm/launch.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/comm/comm_options.h"

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

constexpr std::array kNcclUseNames = {"auto", "off", "always"};

// nullopt where the text is no whole number from 0.
std::optional<int> number_in(std::string_view text) {
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

int whole_number(const EnvironmentLookup& lookup, const char* name) {
  const std::string text = lookup(name).value();
  const std::optional<int> value = number_in(text);
  FSDP_CHECK(value, "environment variable ", name, " is '", text,
             "': it must be a whole number from 0");
  return *value;
}

// The entry of node `node` in Slurm's "4(x2),3", which is short for 4, 4, 3; nullopt where the text
// is another or has no such entry.
std::optional<int> tasks_of_node(std::string_view text, int node) {
  for (int first_node = 0; !text.empty();) {
    const std::string_view entry = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), entry.size() + 1));
    const size_t times = entry.find("(x");
    const bool is_repeated = times != std::string_view::npos;
    if (is_repeated && entry.back() != ')') return std::nullopt;
    const std::optional<int> tasks = number_in(entry.substr(0, times));
    const std::optional<int> num_nodes =
        is_repeated ? number_in(entry.substr(times + 2, entry.size() - times - 3)) : 1;
    if (!tasks || !num_nodes) return std::nullopt;
    if (node - first_node < *num_nodes) return tasks;
    first_node += *num_nodes;
  }
  return std::nullopt;
}

// The tasks of this step on this node. A job's list is for steps that are told of none of their
// own.
std::optional<int> slurm_local_size(const EnvironmentLookup& lookup) {
  if (!lookup("SLURM_NODEID")) return std::nullopt;
  const int node = whole_number(lookup, "SLURM_NODEID");
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"})
    if (const std::optional<std::string> tasks = lookup(name)) return tasks_of_node(*tasks, node);
  return std::nullopt;
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
  constexpr std::array kNames = {"a single process", "mpirun", "srun", "torchrun"};
  return kNames[static_cast<size_t>(launcher)];
}

int gpu_of_rank(int local_rank, int num_visible) { return local_rank % num_visible; }

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
    if (std::optional<Launch> slurm = read_names(lookup, kSlurm)) {
      // Never fewer than this task shows, nor more than there are.
      if (const std::optional<int> tasks = slurm_local_size(lookup))
        slurm->local_size =
            std::clamp(*tasks, std::min(slurm->local_rank + 1, slurm->size), slurm->size);
      return *slurm;
    }
  }
  return Launch{};
}

Launch read_launch() { return read_launch(&env_text); }

void CommOptions::validate() const {
  FSDP_CHECK(timeout_seconds > 0, "timeout_seconds is ", timeout_seconds, ": it must be above 0");
  FSDP_CHECK(bandwidth_bytes_per_s >= 0, "bandwidth_bytes_per_s is ", bandwidth_bytes_per_s,
             ": it must be 0 (no limit) or above");
  FSDP_CHECK(sum_group >= 0, "sum_group is ", sum_group,
             ": it must be 0 (ranks of a host) or above");
}

CommOptions CommOptions::from_environment() {
  static const std::vector<std::string> kOffOn = {"0", "1"};
  CommOptions options;
  options.timeout_seconds = env_seconds("FSDP_TIMEOUT_S", options.timeout_seconds);
  options.checked = env_choice("FSDP_CHECKED", kOffOn, options.checked ? 1 : 0) == 1;
  options.bandwidth_bytes_per_s =
      env_bytes_per_second("FSDP_BANDWIDTH", options.bandwidth_bytes_per_s);
  if (env_text("FSDP_SUM_GROUP")) options.sum_group = whole_number(&env_text, "FSDP_SUM_GROUP");
  static const std::vector<std::string> kNcclUses(kNcclUseNames.begin(), kNcclUseNames.end());
  static const std::vector<std::string> kNcclReduces = {"exact", "native"};
  options.nccl = static_cast<NcclUse>(env_choice("FSDP_NCCL", kNcclUses, 0));
  options.nccl_reduce = static_cast<NcclReduce>(env_choice("FSDP_NCCL_REDUCE", kNcclReduces, 0));
  return options;
}

const char* name_of(NcclUse use) { return kNcclUseNames[static_cast<size_t>(use)]; }

const char* name_of(UserBuffers use) {
  constexpr std::array kNames = {"off", "registered", "symmetric"};
  return kNames[static_cast<size_t>(use)];
}

}  // namespace fsdp
