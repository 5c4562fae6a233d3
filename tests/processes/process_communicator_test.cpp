// The `mpi` and `tcp` backends over processes: the suite every backend must pass, in plain and in
// checked mode, and bitwise the same results as `threads`. Started by ctest with 1 to 4 processes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "fsdp/comm/world.h"
#include "support/communicator_suite.h"
#include "support/process_world.h"

namespace fsdp {
namespace {

World world_of_processes(bool checked) {
  CommOptions options = CommOptions::from_environment();
  options.checked = checked;
  return testing::join_processes(options);
}

TEST(ProcessWorld, HasTheSizeThatTheLauncherPromised) {
  const char* promised = std::getenv("FSDP_TEST_RANKS");
  ASSERT_NE(promised, nullptr) << "start this test through ctest";
  EXPECT_EQ(read_launch().size, std::stoi(promised));
}

class ProcessCommunicatorSuite : public ::testing::TestWithParam<size_t> {};

TEST_P(ProcessCommunicatorSuite, Passes) {
  const testing::CommunicatorCase& claim = testing::communicator_cases()[GetParam()];
  for (const bool checked : {false, true}) {
    World world = world_of_processes(checked);
    claim.body(world, at::kCPU);
    // Staged through pinned memory; the ranks may share one device.
    if (at::hasCUDA()) claim.body(world, at::Device(at::kCUDA, 0));
    world.communicator().barrier("end of case").wait();
  }
}

INSTANTIATE_TEST_SUITE_P(AllCases, ProcessCommunicatorSuite,
                         ::testing::Range(size_t{0}, testing::communicator_cases().size()),
                         [](const auto& test) {
                           return testing::communicator_cases()[test.param].name;
                         });

TEST(ProcessCommunicator, GivesTheSameBitsAsThreads) {
  World world = world_of_processes(/*checked=*/false);
  const uint64_t by_processes = testing::communicator_digest(world);
  run_threads(world.size(), CommOptions::from_environment(), [&](World& threads) {
    EXPECT_EQ(testing::communicator_digest(threads), by_processes);
  });
}

}  // namespace
}  // namespace fsdp

// The job is joined once for all cases: MPI cannot be started twice in a process.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const fsdp::World keeps_the_job_alive =
      fsdp::testing::join_processes(fsdp::CommOptions::from_environment());
  return RUN_ALL_TESTS();
}
