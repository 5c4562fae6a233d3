// How ranks that NCCL connects fail: in words, and without hanging. A part of nccl_device_test; a
// job that has failed stays failed, so nccl_failures_test.py starts one for each test.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <thread>

#include "fsdp/comm/comm_error.h"
#include "fsdp/graph/graph.h"
#include "support/nccl_ranks.h"
#include "support/require.h"

namespace fsdp {
namespace {

using testing::kGpu;
using testing::SmallTraining;
using testing::world_over_nccl;

CommOptions short_deadline() {
  CommOptions options = CommOptions::from_environment();
  options.timeout_seconds = 3;
  return options;
}

// Waits until another rank or the watch has given up.
void wait_for_the_failure(Communicator& comm) {
  while (true) {
    comm.throw_if_aborted();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST(NcclFailures, NameTheOperationThatNobodyElseCameTo) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl(short_deadline());
  Communicator& comm = world.communicator();
  const at::Tensor whole = at::ones({comm.size() * 1000}, kGpu);
  comm.all_gather(whole, whole.narrow(0, comm.rank() * 1000, 1000), "together").wait();
  if (comm.rank() != 0) {
    // This rank stays away, and learns why the others have given up.
    EXPECT_THAT([&] { wait_for_the_failure(comm); },
                ::testing::ThrowsMessage<CommError>(::testing::HasSubstr("'alone'")));
    return;
  }
  comm.all_gather(whole, whole.narrow(0, 0, 1000), "alone").wait();
  EXPECT_THAT([&] { wait_for_the_failure(comm); },
              ::testing::ThrowsMessage<CommError>(::testing::AllOf(
                  ::testing::HasSubstr("not ended within 3 s"), ::testing::HasSubstr("'alone'"))));
  at::ones({1}, kGpu).item<float>();  // the device is free again
}

// More launches than the device takes at once: the one that is stuck comes back, too.
TEST(NcclFailures, EndLaunchesThatAreStuck) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl(short_deadline());
  Communicator& comm = world.communicator();
  const at::Tensor whole = at::ones({comm.size() * 1000}, kGpu);
  comm.all_gather(whole, whole.narrow(0, comm.rank() * 1000, 1000), "together").wait();
  const auto launch_for_ever = [&] {
    while (true) comm.all_gather(whole, whole.narrow(0, comm.rank() * 1000, 1000), "blocks.3");
  };
  const auto call = [&] { comm.rank() == 0 ? launch_for_ever() : wait_for_the_failure(comm); };
  EXPECT_THAT(call, ::testing::ThrowsMessage<CommError>(::testing::HasSubstr("'blocks.3'")));
}

// The last rank is killed while the others wait for it.
TEST(NcclFailures, NameTheOperationOfARankThatDied) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl(CommOptions::from_environment());
  Communicator& comm = world.communicator();
  const at::Tensor whole = at::ones({comm.size() * 1000}, kGpu);
  comm.all_gather(whole, whole.narrow(0, comm.rank() * 1000, 1000), "together").wait();
  whole.cpu();  // it has come
  comm.barrier("all are here").wait();
  if (comm.rank() == comm.size() - 1) std::raise(SIGKILL);
  const auto gather = [&] {
    comm.all_gather(whole, whole.narrow(0, comm.rank() * 1000, 1000), "blocks.3").wait();
    wait_for_the_failure(comm);
  };
  EXPECT_THAT(gather, ::testing::ThrowsMessage<CommError>(::testing::HasSubstr("'blocks.3'")));
  EXPECT_THAT([&] { wait_for_the_failure(comm); }, ::testing::Throws<CommError>()) << "for good";
}

// The last rank runs, but does not come to NCCL's meeting.
TEST(NcclFailures, GiveUpAMeetingToWhichARankDoesNotCome) {
  FSDP_REQUIRE_GPU();
  std::unique_ptr<Communicator> hosts = testing::connect_processes(short_deadline());
  if (hosts->rank() == hosts->size() - 1) {
    EXPECT_THAT([&] { wait_for_the_failure(*hosts); }, ::testing::Throws<CommError>());
    return;
  }
  EXPECT_THAT([&] { over_nccl(std::move(hosts), read_launch().local_rank, short_deadline()); },
              ::testing::Throws<CommError>());
}

// Nothing is enqueued while steps are replayed, so nothing else would tell.
TEST(NcclFailures, EndReplaysToWhichARankDoesNotCome) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl(short_deadline());
  const Mesh mesh = world.mesh();
  SmallTraining training(mesh, {});
  Graph graph(training.sharded(), &training.optimizer(), [&] { training.step(); });
  const auto run = [&](int number) {
    training.begin_step(number);
    graph.run();
    training.loss();
  };
  for (int number = 0; number < 6; ++number) run(number);
  const auto go_on_alone = [&] {
    for (int number = 6;; ++number) run(number);
  };
  const auto call = [&] {
    world.rank() == 0 ? go_on_alone() : wait_for_the_failure(world.communicator());
  };
  EXPECT_THAT(call, ::testing::ThrowsMessage<CommError>(::testing::HasSubstr("a replayed step")));
}

}  // namespace
}  // namespace fsdp
