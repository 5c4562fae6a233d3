// Which rank of how many: every launcher's variables, and every way to get them wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/comm/launch.h"

namespace fsdp::launch_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Variables = std::map<std::string, std::string>;

Launch launch_with(const Variables& variables) {
  return read_launch([&variables](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end() || found->second.empty()) return std::nullopt;
    return found->second;
  });
}

const Variables kMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                        {"OMPI_COMM_WORLD_SIZE", "8"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "6"},
                             {"LOCAL_RANK", "2"},
                             {"LOCAL_WORLD_SIZE", "3"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29500"}};
const Variables kSrun = {
    {"SLURM_PROCID", "4"}, {"SLURM_NTASKS", "16"}, {"SLURM_LOCALID", "0"}, {"SLURM_STEP_ID", "0"}};

Variables merged(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

TEST(Launch, ReadsTheVariablesOfEveryLauncher) {
  EXPECT_EQ(launch_with({}).launcher, Launcher::kSingle);
  EXPECT_EQ(launch_with({}).size, 1);
  const Launch mpi = launch_with(kMpi);
  EXPECT_EQ(mpi.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(mpi.rank, 3);
  EXPECT_EQ(mpi.size, 8);
  EXPECT_EQ(mpi.local_rank, 1);
  EXPECT_EQ(mpi.local_size, 2);
  const Launch torchrun = launch_with(kTorchrun);
  EXPECT_EQ(torchrun.launcher, Launcher::kTorchrun);
  EXPECT_EQ(torchrun.rank, 5);
  EXPECT_EQ(torchrun.local_rank, 2);
  EXPECT_EQ(torchrun.master_address, "node0");
  EXPECT_EQ(torchrun.master_port, 29500);
  EXPECT_EQ(launch_with(kSrun).launcher, Launcher::kSlurm);
  EXPECT_EQ(launch_with(kSrun).rank, 4);
}

TEST(Launch, ChoosesBetweenLaunchersThatAreVisibleAtOnce) {
  Variables batch = kSrun;
  batch.erase("SLURM_STEP_ID");
  EXPECT_EQ(launch_with(batch).launcher, Launcher::kSingle) << "a batch script outside a step";
  EXPECT_EQ(launch_with(merged(kSrun, kMpi)).launcher, Launcher::kOpenMpi);
  EXPECT_EQ(launch_with(merged(kSrun, kTorchrun)).launcher, Launcher::kTorchrun);
  const Variables copied = {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}};
  EXPECT_EQ(launch_with(merged(kMpi, copied)).launcher, Launcher::kOpenMpi) << "by a wrapper";
}

// The tasks of this node and step, which may be fewer than the job's.
TEST(Launch, CountsTheTasksOfASlurmNode) {
  const auto local_size = [](const char* node, const Variables& tasks) {
    return launch_with(merged(merged(kSrun, {{"SLURM_NODEID", node}}), tasks)).local_size;
  };
  const Variables step = {{"SLURM_STEP_TASKS_PER_NODE", "4(x2),3,5"},
                          {"SLURM_TASKS_PER_NODE", "8(x4)"}};
  EXPECT_EQ(local_size("0", step), 4);
  EXPECT_EQ(local_size("1", step), 4);
  EXPECT_EQ(local_size("2", step), 3);
  EXPECT_EQ(local_size("3", step), 5);
  EXPECT_EQ(local_size("1", {{"SLURM_TASKS_PER_NODE", "8(x2)"}}), 8);
}

TEST(Launch, TakesAllTasksForThoseOfItsNodeWhereSlurmSaysNothing) {
  EXPECT_EQ(launch_with(kSrun).local_size, 16);
  const Variables node = merged(kSrun, {{"SLURM_NODEID", "1"}});
  for (const char* tasks : {"", "8", "8(x", "8(xtwo)", "eight,8"})
    EXPECT_EQ(launch_with(merged(node, {{"SLURM_TASKS_PER_NODE", tasks}})).local_size, 16) << tasks;
}

TEST(Launch, GivesARankTheGpuOfItsNumberOrTheOnlyOneThatItSees) {
  EXPECT_EQ(gpu_of_rank(5, 8), 5);
  EXPECT_EQ(gpu_of_rank(5, 1), 0);
  EXPECT_EQ(gpu_of_rank(5, 4), 1);
}

TEST(Launch, NamesVariablesThatContradictEachOtherOrAreMissingOrNoNumbers) {
  Variables no_port = kTorchrun;
  no_port["MASTER_PORT"] = "";
  Variables no_size = kMpi;
  no_size.erase("OMPI_COMM_WORLD_SIZE");
  const struct {
    Variables variables;
    std::vector<std::string> words;
  } cases[] = {{merged(kMpi, kTorchrun), {"OMPI_COMM_WORLD_RANK=3", "RANK=5", "WORLD_SIZE=6"}},
               {merged(kMpi, {{"OMPI_COMM_WORLD_RANK", "8"}}),
                {"OMPI_COMM_WORLD_RANK=8", "OMPI_COMM_WORLD_SIZE=8"}},
               {merged(kTorchrun, {{"LOCAL_RANK", "3"}}), {"LOCAL_RANK=3"}},
               {{{"RANK", "0"}}, {"RANK without WORLD_SIZE, LOCAL_RANK"}},
               {no_port, {"MASTER_PORT"}},
               {no_size, {"without OMPI_COMM_WORLD_SIZE"}},
               {merged(kTorchrun, {{"RANK", "five"}}), {"RANK is 'five'"}},
               {merged(kTorchrun, {{"MASTER_PORT", "70000"}}), {"MASTER_PORT is '70000'"}}};
  for (const auto& each : cases)
    for (const std::string& word : each.words)
      EXPECT_THAT([&each] { launch_with(each.variables); }, ThrowsMessage<Error>(HasSubstr(word)));
}

}  // namespace
}  // namespace fsdp::launch_test
