// The `nccl` backend over processes that share one GPU: the suite every backend must pass, training
// with the same bits as ranks that are threads, and whole steps as graphs. Started by ctest with
// mpirun.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/connect_nccl.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "support/communicator_suite.h"
#include "support/process_world.h"
#include "support/require.h"
#include "support/small_models.h"

namespace fsdp {
namespace {

using testing::small_llama;
using testing::small_tokens;

const at::Device kDevice(at::kCUDA, 0);

World world_over_nccl(CommOptions options = CommOptions::from_environment()) {
  const Launch launch = read_launch();
  return World(launch, over_nccl(connect_mpi(launch, options), launch.local_rank, options));
}

class NcclSuite : public ::testing::TestWithParam<size_t> {};

TEST_P(NcclSuite, Passes) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl();
  testing::communicator_cases()[GetParam()].body(world, kDevice);
  world.communicator().barrier("end of case").wait();
}

INSTANTIATE_TEST_SUITE_P(AllCases, NcclSuite,
                         ::testing::Range(size_t{0}, testing::communicator_cases().size()),
                         [](const auto& test) {
                           return testing::communicator_cases()[test.param].name;
                         });

// A few steps of a small Llama; the loss of each, and the weights at the end.
struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> weights;
};

enum class By { kStep, kGraph };

Result train(World& world, const std::string& strategy, By by) {
  const Mesh mesh = world.mesh();
  const auto model = build_language_model(small_llama(), {.seed = 3, .dtype = at::kBFloat16});
  model->to(kDevice);
  const Sharded sharded = fully_shard(
      model, mesh, {.strategy = parse_strategy(strategy), .precision = {.main_grads = at::kFloat}});
  AdamW optimizer(sharded, {.lr = 1e-2, .step = {.max_norm = 0.5}});
  at::Tensor tokens = small_tokens(0, 0).to(kDevice);
  at::Tensor loss;
  const auto step = [&] {
    const int64_t length = tokens.size(1) - 1;
    const at::Tensor total =
        model->loss(tokens.narrow(1, 0, length), tokens.narrow(1, 1, length)).total;
    total.backward();
    loss = total.detach();
    optimizer.step();
    optimizer.zero_grad();
  };
  std::unique_ptr<Graph> graph;
  if (by == By::kGraph) graph = std::make_unique<Graph>(sharded, &optimizer, step);
  Result result;
  for (int number = 0; number < 12; ++number) {
    tokens.copy_(small_tokens(world.rank(), number % 3));
    optimizer.set_learning_rate(1e-2 / (1 + number));
    graph ? graph->run() : step();
    result.losses.push_back(loss.item<double>());
  }
  const auto whole = sharded.full_parameters();
  for (const at::Tensor& parameter : model->parameters()) result.weights.push_back(parameter.cpu());
  return result;
}

void expect_same(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_TRUE(at::equal(actual.weights[i], expected.weights[i])) << "parameter " << i;
}

class Training : public ::testing::TestWithParam<std::string> {};

TEST_P(Training, HasTheBitsOfThreads) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl();
  const Result by_nccl = train(world, GetParam(), By::kStep);
  Result by_threads;
  run_threads(world.size(), {.timeout_seconds = 60}, [&](World& threads) {
    Result result = train(threads, GetParam(), By::kStep);
    if (threads.rank() == world.rank()) by_threads = std::move(result);
  });
  expect_same(by_nccl, by_threads);
  world.communicator().barrier("end of case").wait();
}

TEST_P(Training, ReplaysAsAGraphWithTheSameBits) {
  FSDP_REQUIRE_GPU();
  World world = world_over_nccl();
  const Result eager = train(world, GetParam(), By::kStep);
  expect_same(train(world, GetParam(), By::kGraph), eager);
  world.communicator().barrier("end of case").wait();
}

INSTANTIATE_TEST_SUITE_P(Strategies, Training,
                         ::testing::Values("no_shard", "optim", "optim_grads",
                                           "optim_grads_params"),
                         [](const auto& test) { return test.param; });

TEST(NcclCommunicator, AddsNativelyWhereItIsAskedTo) {
  FSDP_REQUIRE_GPU();
  CommOptions options = CommOptions::from_environment();
  options.nccl_reduce = NcclReduce::kNative;
  World world = world_over_nccl(options);
  Communicator& comm = world.communicator();
  const auto floats = at::device(kDevice).dtype(at::kFloat);
  const at::Tensor input = at::arange(comm.size() * 1000, floats).add_(comm.rank());
  const at::Tensor output = at::ones({1000}, floats);
  const at::Tensor squares = at::zeros({1}, floats.dtype(at::kDouble));
  comm.reduce_scatter(
          output, input,
          {.op = ReduceOp::kAvg, .scale = 2.0, .store = Store::kAdd, .squares = squares}, "native")
      .wait();
  // Whole numbers: exact in any order.
  const at::Tensor mine = at::arange(comm.rank() * 1000, (comm.rank() + 1) * 1000, floats);
  const at::Tensor expected = 1 + 2 * mine + (comm.size() - 1);
  EXPECT_TRUE(at::equal(output, expected));
  EXPECT_EQ(squares.item<double>(), expected.to(at::kDouble).square().sum().item<double>());
  comm.barrier("end of case").wait();
}

TEST(NcclFailures, NameTheOperationThatNobodyElseCameTo) {
  FSDP_REQUIRE_GPU();
  ASSERT_GE(read_launch().size, 2) << "start this test through ctest";
  CommOptions options = CommOptions::from_environment();
  options.timeout_seconds = 3;
  World world = world_over_nccl(options);
  Communicator& comm = world.communicator();
  const at::Tensor whole = at::ones({comm.size() * 1000}, kDevice);
  comm.all_gather(whole, whole.narrow(0, comm.rank() * 1000, 1000), "together").wait();
  if (comm.rank() != 0) {
    // This rank stays away; it hears why the others have given up.
    EXPECT_THAT(
        [&] {
          while (true) comm.throw_if_aborted();
        },
        ::testing::ThrowsMessage<CommError>(::testing::HasSubstr("'alone'")));
    return;
  }
  comm.all_gather(whole, whole.narrow(0, 0, 1000), "alone").wait();
  EXPECT_THAT(
      [&] {
        while (true) comm.throw_if_aborted();
      },
      ::testing::ThrowsMessage<CommError>(::testing::AllOf(
          ::testing::HasSubstr("not ended within 3 s"), ::testing::HasSubstr("'alone'"))));
}

}  // namespace
}  // namespace fsdp

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // NCCL takes one process per GPU and host. Each process is told that it is a host of its own, so
  // that they reach each other over the network, as hosts do.
  const fsdp::Launch launch = fsdp::read_launch();
  setenv("NCCL_HOSTID", ("host" + std::to_string(launch.rank)).c_str(), 1);
  const fsdp::World keeps_the_job_alive =
      fsdp::testing::join_processes(fsdp::CommOptions::from_environment());
  return RUN_ALL_TESTS();
}
