// The `nccl` backend over processes that share one GPU: the suite every backend must pass, training
// with the same bits as ranks that are threads, and whole steps as graphs. Started by ctest through
// start_ranks.py. What goes wrong is in nccl_failures_device_test.cpp, memory that NCCL uses in
// place in user_buffers_device_test.cpp.
#include <ATen/ATen.h>
#include <c10/util/signal_handler.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/graph/graph.h"
#include "support/communicator_suite.h"
#include "support/nccl_ranks.h"
#include "support/parity.h"
#include "support/require.h"
#include "support/shared_nccl_ranks.h"

namespace fsdp {
namespace {

using testing::By;
using testing::expect_same;
using testing::kGpu;
using testing::shared_ranks;
using testing::SmallOptions;
using testing::SmallResult;
using testing::SmallTraining;
using testing::train_small;
using testing::world_over_nccl;

class NcclSuite : public ::testing::TestWithParam<size_t> {};

TEST_P(NcclSuite, Passes) {
  FSDP_REQUIRE_GPU();
  World& world = shared_ranks->world();
  testing::communicator_cases()[GetParam()].body(world, kGpu);
  world.communicator().barrier("end of case").wait();
}

INSTANTIATE_TEST_SUITE_P(AllCases, NcclSuite,
                         ::testing::Range(size_t{0}, testing::communicator_cases().size()),
                         [](const auto& test) {
                           return testing::communicator_cases()[test.param].name;
                         });

struct TrainingCase {
  std::string name;
  std::string strategy;
  enum class Along { kInner, kOuter } ranks = Along::kInner;
};
class Training : public ::testing::TestWithParam<TrainingCase> {};

TEST_P(Training, HasTheBitsOfThreadsAndReplaysThemAsAGraph) {
  FSDP_REQUIRE_GPU();
  const bool is_outer = GetParam().ranks == TrainingCase::Along::kOuter;
  const Mesh& mesh = is_outer ? shared_ranks->outer_mesh() : shared_ranks->mesh();
  World& world = shared_ranks->world();
  const SmallOptions options{.strategy = GetParam().strategy};
  const SmallResult by_nccl = train_small(mesh, options, By::kStep);
  SmallResult by_threads;
  run_threads(world.size(), {.timeout_seconds = 60}, [&](World& threads) {
    SmallResult result =
        train_small(threads.mesh({.outer = is_outer ? threads.size() : 1}), options, By::kStep);
    if (threads.rank() == world.rank()) by_threads = std::move(result);
  });
  expect_same(by_nccl, by_threads);
  expect_same(train_small(mesh, options, By::kGraph), by_nccl);
  world.communicator().barrier("end of case").wait();
}

INSTANTIATE_TEST_SUITE_P(
    Strategies, Training,
    ::testing::Values(TrainingCase{"no_shard", "no_shard"}, TrainingCase{"optim", "optim"},
                      TrainingCase{"optim_grads", "optim_grads"},
                      TrainingCase{"optim_grads_params", "optim_grads_params"},
                      TrainingCase{"hsdp", "optim_grads_params", TrainingCase::Along::kOuter},
                      TrainingCase{"hfsdp", "optim_grads_params+hfsdp",
                                   TrainingCase::Along::kOuter},
                      TrainingCase{"hfsdp_zero1", "optim+hfsdp", TrainingCase::Along::kOuter}),
    [](const auto& test) { return test.param.name; });

// Tokens travel to the experts of the other rank, or both compute one loss.
TEST(NcclAxes, HaveTheBitsOfThreadsAndReplayThemAsAGraph) {
  FSDP_REQUIRE_GPU();
  World& world = shared_ranks->world();
  if (world.size() != 2) GTEST_SKIP() << "for two ranks";
  for (const MeshOptions& axes : {MeshOptions{.ep = 2}, {.tp = 2}, {.ep = 2, .tp = 2}}) {
    SCOPED_TRACE(concat("ep ", axes.ep, ", tp ", axes.tp));
    const auto trained = [](const Mesh& mesh, By by) {
      return train_small(mesh, {.config = testing::aligned_mixtral()}, by);
    };
    const Mesh mesh = world.mesh(axes);
    const SmallResult by_nccl = trained(mesh, By::kStep);
    EXPECT_LT(by_nccl.losses.back(), by_nccl.losses.front());
    SmallResult by_threads;
    run_threads(2, {.timeout_seconds = 60}, [&](World& threads) {
      SmallResult result = trained(threads.mesh(axes), By::kStep);
      if (threads.rank() == world.rank()) by_threads = std::move(result);
    });
    expect_same(by_nccl, by_threads);
    expect_same(trained(mesh, By::kGraph), by_nccl);
    world.communicator().barrier("end of case").wait();
  }
}

// An abandoned recording left the host with gathers that never happened.
TEST(NcclGraph, GoesOnEagerlyWhenAStepCannotBeRecorded) {
  FSDP_REQUIRE_GPU();
  const Mesh& mesh = shared_ranks->mesh();
  SmallTraining plain(mesh, {.strategy = "optim"});
  SmallTraining training(mesh, {.strategy = "optim"});
  Graph graph(training.sharded(), &training.optimizer(), [&] {
    training.step();
    training.loss();  // waits for the device
  });
  for (int number = 0; number < 6; ++number) {
    plain.begin_step(number);
    plain.step();
    training.begin_step(number);
    if (number < 3) {
      graph.run();
    } else {
      EXPECT_THROW(graph.run(), Error);
      training.step();
    }
    EXPECT_EQ(training.loss(), plain.loss()) << number;
  }
  shared_ranks->world().communicator().barrier("end of case").wait();
}

// --- parity --------------------------------------------------------------------------------------

// These cases run over MPI and TCP, too.
class Parity : public ::testing::TestWithParam<testing::ParityCase> {};

TEST_P(Parity, TrainsLikeAPlainModelAndLikeThreads) {
  FSDP_REQUIRE_GPU();
  ASSERT_TRUE(testing::test_device().is_cuda()) << "start this test through ctest";
  World& world = shared_ranks->world();
  testing::ParityCase parity = GetParam();
  (parity.outer > 1 ? parity.outer : parity.inner) = world.size();
  const testing::RankOutcome outcome = testing::train_rank(world, parity);
  // Gradients of bf16 weights reach fp32 main gradients unrounded on a GPU, unlike a plain model's.
  if (parity.precision == testing::Precision::kFp32)
    testing::expect_parity(outcome, parity, world.rank());
  const std::vector<testing::RankOutcome> by_threads = testing::train_threads(parity);
  testing::expect_equal_bits(outcome, by_threads[static_cast<size_t>(world.rank())]);
  world.communicator().barrier("end of case").wait();
}

std::vector<testing::ParityCase> parity_cases() {
  using testing::ModelKind;
  using testing::Precision;
  return {{.model = ModelKind::kHybrid, .microbatches = 3},
          {.model = ModelKind::kLlama,
           .strategy = "optim_grads_params+hfsdp",
           .outer = 2,
           .pool = PoolKind::kPlanned,
           .precision = Precision::kBf16Wire,
           .lifetime = GradientLifetime::kStep,
           .gradient = GradientOf::kSumOverRanks},
          {.model = ModelKind::kLlama,
           .strategy = "optim_grads",
           .outer = 2,
           .precision = Precision::kBf16,
           .updated_by = testing::UpdatedBy::kOurs},
          {.model = ModelKind::kMlp, .strategy = "optim", .microbatches = 2}};
}

INSTANTIATE_TEST_SUITE_P(Cases, Parity, ::testing::ValuesIn(parity_cases()), [](const auto& test) {
  return std::to_string(test.index) + "_" + test.param.name();
});

// NCCL adds these: whole numbers, which are exact in any order.
void check_native_sum(Communicator& comm, at::ScalarType type, const Reduction& reduction) {
  const auto options = at::device(kGpu).dtype(type);
  const int64_t numel = 96;
  const at::Tensor input =
      at::arange(comm.size() * numel, options).remainder_(64).add_(comm.rank());
  const at::Tensor output = at::ones({numel}, options);
  comm.reduce_scatter(output, input, reduction, "native").wait();
  const at::Tensor mine =
      at::arange(comm.rank() * numel, (comm.rank() + 1) * numel, options).remainder_(64);
  const int64_t ranks = comm.size();
  at::Tensor expected = mine * ranks + ranks * (ranks - 1) / 2;
  if (reduction.op == ReduceOp::kAvg) expected = expected.to(at::kDouble).div_(ranks).to(type);
  expected = expected * reduction.scale;
  if (reduction.store == Store::kAdd) expected = expected + 1;
  EXPECT_TRUE(at::allclose(output, expected, 1e-6, 0.0))
      << type << " " << name_of(reduction.op) << " " << reduction.scale;
  if (reduction.squares.defined()) {
    EXPECT_EQ(reduction.squares.item<double>(),
              output.to(at::kDouble).square().sum().item<double>());
  }
}

TEST(NcclCommunicator, AddsNativelyWhereItIsAskedTo) {
  FSDP_REQUIRE_GPU();
  CommOptions options = CommOptions::from_environment();
  options.nccl_reduce = NcclReduce::kNative;
  World world = world_over_nccl(options);
  Communicator& comm = world.communicator();
  const at::Tensor squares = at::zeros({1}, at::device(kGpu).dtype(at::kDouble));
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    check_native_sum(comm, type, {});
    check_native_sum(comm, type, {.scale = 2.0});
    check_native_sum(comm, type, {.op = ReduceOp::kAvg, .scale = comm.size() * 0.5});
    check_native_sum(comm, type,
                     {.op = ReduceOp::kAvg, .scale = 2.0 * comm.size(), .store = Store::kAdd});
    check_native_sum(comm, type, {.scale = 2.0, .squares = squares.zero_()});
  }
  comm.barrier("end of case").wait();
}

// The least of several rounds: other work can only slow the host down.
double host_microseconds(const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int round = 0; round < 10; ++round) {
    at::ones({1}, kGpu).item<float>();  // nothing is under way
    shared_ranks->world().communicator().barrier("round").wait();
    const Clock::time_point begin = Clock::now();
    for (int repeat = 0; repeat < 20; ++repeat) call();
    const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
    best = std::min(best, took.count() / 20);
  }
  return best;
}

// 30 times what was measured on one machine, as others may be slow; NCCL's other mode took 600.
TEST(NcclCommunicator, TakesLittleOfTheHostsTime) {
  FSDP_REQUIRE_GPU();
  Communicator& comm = shared_ranks->mesh().inner().gather();
  const auto bf16 = at::device(kGpu).dtype(at::kBFloat16);
  const at::Tensor share = at::ones({1 << 16}, bf16);
  const at::Tensor whole = at::ones({comm.size() << 16}, bf16);
  const at::Tensor main_share = at::zeros({1 << 16}, bf16.dtype(at::kFloat));
  const at::Tensor flag = at::zeros({1}, bf16.dtype(at::kFloat));
  const Reduction adds = {.store = Store::kAdd, .nonfinite = flag};
  const double gather = host_microseconds([&] { comm.all_gather(whole, share, "gather").wait(); });
  const double reduce =
      host_microseconds([&] { comm.reduce_scatter(main_share, whole, adds, "reduce").wait(); });
  const double sum = host_microseconds([&] { comm.all_reduce(flag, {}, "sum").wait(); });
  if (comm.rank() == 0)
    std::printf(
        "host us per call, %d ranks: all_gather %.1f, reduce_scatter %.1f, all_reduce %.1f\n",
        comm.size(), gather, reduce, sum);
  EXPECT_LT(gather, 300);
  EXPECT_LT(reduce, 300);
  EXPECT_LT(sum, 300);
}

// --- which transport -----------------------------------------------------------------------------

// A process of its own for these (tests/device/CMakeLists.txt): NCCL reads NCCL_HOSTID once.
void expect_transport(const std::string& words, bool by_nccl, int gpu_ranks) {
  World world = World::from_environment({.timeout_seconds = 60});
  EXPECT_THAT(world.transport(), ::testing::HasSubstr(words));
  EXPECT_EQ(world.communicator().nccl() != nullptr, by_nccl);
  EXPECT_EQ(world.launch().gpu_ranks, gpu_ranks);
  const at::Tensor sum = at::ones({1 << 10}, at::device(kGpu).dtype(at::kFloat));
  world.communicator().all_reduce(sum, {}, "sum").wait();
  EXPECT_TRUE((sum == world.size()).all().item<bool>());
  world.communicator().barrier("end of case").wait();
}

TEST(NcclTransport, IsHostMemoryWhereRanksOfOneHostShareAGpu) {
  FSDP_REQUIRE_GPU();
  const Launch launch = read_launch();
  if (launch.size == 1) GTEST_SKIP() << "for several ranks";
  const std::string own_host = std::getenv("NCCL_HOSTID");
  unsetenv("NCCL_HOSTID");
  expect_transport("ranks 0 and 1 share the GPU ", false, launch.size);
  setenv("NCCL_HOSTID", own_host.c_str(), 1);
}

TEST(NcclTransport, IsNcclWhereEachHostHasOneRank) {
  FSDP_REQUIRE_GPU();
  const Launch launch = read_launch();
  if (launch.size == 1) GTEST_SKIP() << "for several ranks";
  expect_transport(concat("by NCCL: ", launch.size, " ranks on ", launch.size,
                          " hosts, each with a GPU of its own"),
                   true, 1);
}

}  // namespace
}  // namespace fsdp

int main(int argc, char** argv) {
  const fsdp::Launch launch = fsdp::read_launch();
  // One rank tells the progress, all of them their failures.
  GTEST_FLAG_SET(brief, launch.rank > 0);
  ::testing::InitGoogleTest(&argc, argv);
  // Where a rank hangs is told by kill -ABRT.
  c10::FatalSignalHandler::getInstance().setPrintStackTracesOnFatalSignal(true);
  // NCCL takes one process per GPU and host. Each process is told that it is a host of its own, so
  // that they reach each other over the network, as hosts do.
  setenv("NCCL_HOSTID", ("host" + std::to_string(launch.rank)).c_str(), 1);
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_SUBSYS", "REG", 1);
  setenv("NCCL_DEBUG_FILE", fsdp::testing::nccl_log_path().c_str(), 1);
  const fsdp::World keeps_the_job_alive =
      fsdp::testing::join_processes(fsdp::CommOptions::from_environment());
  ::testing::AddGlobalTestEnvironment(fsdp::testing::shared_ranks);
  return RUN_ALL_TESTS();
}
