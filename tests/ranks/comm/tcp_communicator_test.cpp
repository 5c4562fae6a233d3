// The suite every backend must pass, over TCP between threads of one process: where a sanitizer can
// watch all ranks.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>

#include "fsdp/base/log.h"
#include "fsdp/comm/backends.h"
#include "fsdp/comm/tcp/tcp_transport.h"
#include "fsdp/comm/world.h"
#include "support/communicator_suite.h"
#include "support/reduction_cases.h"
#include "support/tcp_threads.h"

namespace fsdp::tcp_communicator_test {
namespace {

// An even number of ranks is connected by the first messages, as many ranks are.
void run_transports(int size, const CommOptions& options,
                    const std::function<void(World&, TcpTransport&)>& body) {
  const std::vector<std::string> errors = testing::run_connected(
      size,
      [&](int rank, TcpMesh mesh) {
        set_thread_rank(rank);
        Launch launch;
        launch.rank = launch.local_rank = rank;
        launch.size = launch.local_size = size;
        auto transport = std::make_shared<TcpTransport>(rank, std::move(mesh));
        World world(launch, communicator_over(transport, options));
        body(world, *transport);
      },
      /*max_meshed_ranks=*/size % 2 == 0 ? 0 : size);
  EXPECT_THAT(errors, ::testing::Each(""));
}

void run_tcp(int size, const CommOptions& options, const std::function<void(World&)>& body) {
  run_transports(size, options, [&](World& world, TcpTransport&) { body(world); });
}

class TcpCommunicatorSuite : public ::testing::TestWithParam<std::tuple<int, size_t>> {};

TEST_P(TcpCommunicatorSuite, Passes) {
  const auto [ranks, index] = GetParam();
  const testing::CommunicatorCase& claim = testing::communicator_cases()[index];
  run_tcp(ranks, {.timeout_seconds = 60, .checked = ranks == 3},
          [&](World& world) { claim.body(world, at::kCPU); });
}

INSTANTIATE_TEST_SUITE_P(AllCases, TcpCommunicatorSuite,
                         ::testing::Combine(::testing::Values(2, 3),
                                            ::testing::Range(size_t{0},
                                                             testing::communicator_cases().size())),
                         [](const auto& test) {
                           return testing::communicator_cases()[std::get<1>(test.param)].name +
                                  "_on_" + std::to_string(std::get<0>(test.param));
                         });

TEST(TcpCommunicator, GivesTheSameBitsAsThreads) {
  std::set<uint64_t> digests;
  const auto compare = [&](int ranks, int group) {
    const CommOptions options{.timeout_seconds = 60, .sum_group = group};
    uint64_t by_threads = 0;
    run_threads(ranks, options, [&](World& world) {
      const uint64_t digest = testing::communicator_digest(world);
      if (world.rank() == 0) by_threads = digest;
    });
    run_tcp(ranks, options,
            [&](World& world) { EXPECT_EQ(testing::communicator_digest(world), by_threads); });
    digests.insert(by_threads);
  };
  for (const int ranks : {2, 3}) compare(ranks, 0);
  EXPECT_EQ(digests.size(), 2);
  // The order is one tree for groups of a power of two, and another one for groups of three.
  for (const int group : {0, 1, 2, 4, 8}) compare(8, group);
  EXPECT_EQ(digests.size(), 3);
  for (const int group : {0, 2, 6}) compare(6, group);
  EXPECT_EQ(digests.size(), 4);
  compare(6, 3);
  EXPECT_EQ(digests.size(), 5);
  // So many ranks exchange what is small in rounds.
  for (const int group : {0, 6}) compare(18, group);
}

// A rank of many is connected with few of them when all agree on something small.
TEST(TcpCommunicator, ConnectsFewOfManyRanksForSmallCollectives) {
  constexpr int kRanks = 40;
  run_transports(kRanks, {.timeout_seconds = 60}, [](World& world, TcpTransport& transport) {
    Communicator& all = world.communicator();
    all.barrier("test").wait();
    const at::Tensor sum = at::full({3}, world.rank(), at::kDouble);
    all.all_reduce(sum, {}, "test").wait();
    EXPECT_TRUE(sum.eq(kRanks * (kRanks - 1) / 2).all().item<bool>());
    const at::Tensor ranks = at::empty({kRanks}, at::kLong);
    all.all_gather(ranks, at::full({1}, world.rank(), at::kLong), "test").wait();
    EXPECT_TRUE(at::equal(ranks, at::arange(kRanks, at::kLong)));
    for (const int root : {0, 17}) {
      const at::Tensor told = at::full({2}, world.rank(), at::kInt);
      all.broadcast(told, root, "test").wait();
      EXPECT_TRUE(told.eq(root).all().item<bool>());
    }
    // Six rounds of sums, each with a rank before and one after this one, and rank 0.
    EXPECT_LE(transport.num_connections(), world.rank() == 0 ? kRanks - 1 : 2 * 6 + 1);
  });
}

TEST(TcpCommunicator, ReducesInGroups) {
  for (const auto& [ranks, group] : {std::pair(4, 2), std::pair(6, 3)})
    for (const testing::CommunicatorCase& claim : testing::reduction_cases())
      run_tcp(ranks, {.timeout_seconds = 60, .checked = ranks == 4, .sum_group = group},
              [&](World& world) { claim.body(world, at::kCPU); });
}

}  // namespace
}  // namespace fsdp::tcp_communicator_test
