// The `mpi` backend under mpirun: the suite every backend must pass, in plain and in checked mode,
// and bitwise the same results as `threads`. Started by ctest with 1, 2, 3 and 4 processes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "fsdp/comm/connect_mpi.h"
#include "fsdp/comm/world.h"
#include "support/communicator_suite.h"

namespace fsdp {
namespace {

World mpi_world(bool checked) {
  const Launch launch = read_launch();
  CommOptions options = CommOptions::from_environment();
  options.checked = checked;
  return World(launch, connect_mpi(launch, options));
}

TEST(MpiWorld, HasTheSizeThatTheLauncherPromised) {
  const char* promised = std::getenv("FSDP_TEST_RANKS");
  ASSERT_NE(promised, nullptr) << "start this test through ctest";
  EXPECT_EQ(read_launch().size, std::stoi(promised));
}

class MpiCommunicatorSuite : public ::testing::TestWithParam<size_t> {};

TEST_P(MpiCommunicatorSuite, Passes) {
  const testing::CommunicatorCase& claim = testing::communicator_cases()[GetParam()];
  for (const bool checked : {false, true}) {
    World world = mpi_world(checked);
    claim.body(world, at::kCPU);
    // Staged through pinned memory; the ranks may share one device.
    if (at::hasCUDA()) claim.body(world, at::Device(at::kCUDA, 0));
    world.communicator().barrier("end of case").wait();
  }
}

INSTANTIATE_TEST_SUITE_P(AllCases, MpiCommunicatorSuite,
                         ::testing::Range(size_t{0}, testing::communicator_cases().size()),
                         [](const auto& test) {
                           return testing::communicator_cases()[test.param].name;
                         });

TEST(MpiCommunicator, GivesTheSameBitsAsThreads) {
  World world = mpi_world(/*checked=*/false);
  const uint64_t by_processes = testing::communicator_digest(world);
  run_threads(world.size(), {}, [&](World& threads) {
    EXPECT_EQ(testing::communicator_digest(threads), by_processes);
  });
}

}  // namespace
}  // namespace fsdp

// The job is joined once for all cases: MPI cannot be started twice in a process.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  fsdp::World keeps_the_job_alive =
      fsdp::World(fsdp::read_launch(), fsdp::connect_mpi(fsdp::read_launch(), fsdp::CommOptions{}));
  return RUN_ALL_TESTS();
}
