// Ranks that are threads sharing one device: the suite every backend must pass, with device
// tensors, real streams and events.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "support/communicator_suite.h"
#include "support/rank_pattern.h"
#include "support/require.h"

namespace fsdp::communicator_device_test {
namespace {

const at::Device kDevice(at::kCUDA, 0);
const CommOptions kShortDeadline = {.timeout_seconds = 60};

class DeviceCommunicatorSuite : public ::testing::TestWithParam<std::tuple<size_t, int>> {};

TEST_P(DeviceCommunicatorSuite, Passes) {
  FSDP_REQUIRE_GPU();
  const auto [index, ranks] = GetParam();
  const testing::CommunicatorCase& claim = testing::communicator_cases()[index];
  run_threads(ranks, kShortDeadline, [&](World& world) { claim.body(world, kDevice); });
}

INSTANTIATE_TEST_SUITE_P(AllCases, DeviceCommunicatorSuite,
                         ::testing::Combine(::testing::Range(size_t{0},
                                                             testing::communicator_cases().size()),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& test) {
                           return testing::communicator_cases()[std::get<0>(test.param)].name +
                                  "On" + std::to_string(std::get<1>(test.param)) + "Ranks";
                         });

// Each rank computes on its own stream and hands over without waiting; a missing event would show
// as stale values in some round.
TEST(DeviceCommunicator, OrdersCollectivesWithTheCallersStream) {
  FSDP_REQUIRE_GPU();
  run_threads(3, kShortDeadline, [](World& world) {
    const c10::impl::VirtualGuardImpl guard_impl(kDevice.type());
    const c10::StreamGuard guard(guard_impl.getNewStream(kDevice));
    Communicator& comm = world.communicator();
    const int64_t numel = 1 << 22;
    at::Tensor share = at::empty({numel}, at::device(kDevice).dtype(at::kFloat));
    at::Tensor whole = at::empty({numel * comm.size()}, at::device(kDevice).dtype(at::kFloat));
    at::Tensor wrong = at::zeros({1}, at::device(kDevice).dtype(at::kLong));
    for (int round = 0; round < 50; ++round) {
      share.fill_(round * 10 + comm.rank());
      for (int busy = 0; busy < 4; ++busy) share.add_(1).sub_(1);
      comm.all_gather(whole, share, "round").wait();
      share.fill_(-1);  // must not reach anybody: everyone's copy is ordered before it
      for (int rank = 0; rank < comm.size(); ++rank)
        wrong += (whole.narrow(0, rank * numel, numel) != round * 10 + rank).sum();
    }
    EXPECT_EQ(wrong.item<int64_t>(), 0);
  });
}

// Every collective is enqueued behind some 100 ms of work; if the host waited for the device
// anywhere, that work would be over by the time the last wait() returns.
TEST(DeviceCommunicator, NeverMakesTheHostWaitForTheDevice) {
  FSDP_REQUIRE_GPU();
  const auto bf16 = at::device(kDevice).dtype(at::kBFloat16);
  const at::Tensor matrix = at::ones({8192, 8192}, bf16);
  at::mm(matrix, matrix);  // loads the kernel
  run_threads(3, kShortDeadline, [&](World& world) {
    Communicator& comm = world.communicator();
    at::Tensor share = at::ones({1 << 20}, bf16);
    at::Tensor whole = at::ones({comm.size() << 20}, bf16);
    at::Tensor main_share = at::zeros({1 << 20}, bf16.dtype(at::kFloat));
    const at::Tensor flag = at::zeros({1}, bf16.dtype(at::kFloat));
    const std::vector<int> together(static_cast<size_t>(comm.size()), 0);
    const auto other = comm.split(together, "other");
    const auto all_kinds = [&] {
      comm.all_gather(whole, share, "gather").wait();
      comm.reduce_scatter(share, whole, {}, "scatter").wait();
      comm.all_reduce(whole, {.op = ReduceOp::kAvg}, "reduce").wait();
      comm.broadcast(whole, 0, "broadcast").wait();
      const Work gathered = other->all_gather(whole, share, "first");
      const Reduction adds = {.store = Store::kAdd, .nonfinite = flag};
      comm.reduce_scatter(main_share, whole, adds, "second", {}, gathered).wait();
    };
    all_kinds();  // creates streams, allocates what the sums need
    at::Tensor product;
    for (int i = 0; i < 80; ++i) product = at::mm(matrix, matrix);
    c10::Event computed(kDevice.type());
    computed.record(c10::impl::VirtualGuardImpl(kDevice.type()).getStream(kDevice));
    all_kinds();
    EXPECT_FALSE(computed.query());
  });
}

// The gather is held up by the caller's stream, the reduction is not: only `after` keeps it from
// reading what has not arrived.
TEST(DeviceCommunicator, FollowsWorkOfAnotherStream) {
  FSDP_REQUIRE_GPU();
  run_threads(3, kShortDeadline, [](World& world) {
    const c10::impl::VirtualGuardImpl guard_impl(kDevice.type());
    Communicator& comm = world.communicator();
    const std::vector<int> together(static_cast<size_t>(comm.size()), 0);
    const auto other = comm.split(together, "other");
    const int64_t numel = 1 << 22;
    const auto floats = at::device(kDevice).dtype(at::kFloat);
    at::Tensor share = at::empty({numel}, floats);
    at::Tensor whole = at::empty({numel * comm.size()}, floats);
    at::Tensor sum = at::empty({numel}, floats);
    at::Tensor wrong = at::zeros({1}, floats.dtype(at::kLong));
    const c10::Stream second = guard_impl.getNewStream(kDevice);
    for (int round = 0; round < 50; ++round) {
      for (int busy = 0; busy < 8; ++busy) share.fill_(busy);
      share.fill_(round + comm.rank());
      const Work gathered = other->all_gather(whole, share, "gather");
      Work reduced;
      {
        const c10::StreamGuard guard(second);
        reduced = comm.reduce_scatter(sum, whole, {}, "reduce", {}, gathered);
      }
      reduced.wait();
      wrong += (sum != comm.size() * (round + comm.rank())).sum();
    }
    EXPECT_EQ(wrong.item<int64_t>(), 0);
  });
}

// fp64 into narrow types is rounded once there too.
TEST(DeviceCommunicator, AddsWithTheSameBitsAsTheHost) {
  FSDP_REQUIRE_GPU();
  run_threads(3, kShortDeadline, [](World& world) {
    Communicator& comm = world.communicator();
    for (const at::ScalarType wire : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      for (const at::ScalarType result : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        const at::Tensor input = testing::rank_pattern(comm.rank(), 3 * 100003, wire);
        at::Tensor on_host = testing::rank_pattern(comm.rank(), 100003, result, 1);
        at::Tensor on_device = on_host.to(kDevice);
        const Reduction adds = {.op = ReduceOp::kAvg, .scale = 0.7, .store = Store::kAdd};
        comm.reduce_scatter(on_host, input, adds, "host").wait();
        comm.reduce_scatter(on_device, input.to(kDevice), adds, "device").wait();
        EXPECT_TRUE(testing::same_bytes(on_host, on_device)) << wire << " " << result;
      }
    }
  });
}

TEST(DeviceCommunicator, GivesTheSameBitsAsTheHost) {
  FSDP_REQUIRE_GPU();
  run_threads(3, kShortDeadline, [](World& world) {
    Communicator& comm = world.communicator();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      at::Tensor on_host = testing::rank_pattern(comm.rank(), 100003, dtype);
      at::Tensor on_device = on_host.to(kDevice);
      comm.all_reduce(on_host, {.op = ReduceOp::kAvg, .scale = 1.3}, "host").wait();
      comm.all_reduce(on_device, {.op = ReduceOp::kAvg, .scale = 1.3}, "device").wait();
      EXPECT_TRUE(testing::same_bytes(on_host, on_device)) << dtype;
    }
  });
}

}  // namespace
}  // namespace fsdp::communicator_device_test
