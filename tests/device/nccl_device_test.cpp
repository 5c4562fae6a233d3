// The `nccl` backend over processes that share one GPU: the suite every backend must pass, training
// with the same bits as ranks that are threads, and whole steps as graphs. Started by ctest through
// start_ranks.py. What goes wrong is in nccl_failures_device_test.cpp.
#include <ATen/ATen.h>
#include <c10/util/signal_handler.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/graph/graph.h"
#include "support/communicator_suite.h"
#include "support/nccl_ranks.h"
#include "support/parity.h"
#include "support/require.h"

namespace fsdp {
namespace {

using testing::kGpu;
using testing::SmallTraining;
using testing::world_over_nccl;

// The file to which NCCL of this process logs its use of registered memory.
std::string nccl_log_path() { return ::testing::TempDir() + "nccl." + std::to_string(getpid()); }

// Processes on one GPU take turns of some milliseconds, and every communicator needs many to meet.
// So the tests share ranks, except those that fail.
class SharedRanks : public ::testing::Environment {
 public:
  World& world() {
    if (!world_) world_.emplace(world_over_nccl(CommOptions::from_environment()));
    return *world_;
  }
  const Mesh& mesh() {
    if (!mesh_) mesh_.emplace(world().mesh());
    return *mesh_;
  }
  // All ranks along the outer axis; the inner one has collectives of one rank.
  const Mesh& outer_mesh() {
    if (!outer_mesh_) outer_mesh_.emplace(world().mesh({.outer = world().size()}));
    return *outer_mesh_;
  }
  void TearDown() override {
    outer_mesh_.reset();
    mesh_.reset();
    world_.reset();
  }

 private:
  std::optional<World> world_;
  std::optional<Mesh> mesh_;
  std::optional<Mesh> outer_mesh_;
};

SharedRanks* const shared_ranks = new SharedRanks;  // belongs to GoogleTest

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

// A few steps of a small Llama; the loss of each, some validations, and the weights at the end.
struct Result {
  std::vector<double> losses;
  std::vector<double> validations;
  std::vector<at::Tensor> weights;
};

enum class By { kStep, kGraph };

Result train(const Mesh& mesh, const std::string& strategy, By by,
             UserBuffers user_buffers = UserBuffers::kOff,
             const ModelConfig& config = testing::small_llama()) {
  SmallTraining training(mesh, strategy, user_buffers, at::kFloat, config);
  std::unique_ptr<Graph> graph;
  if (by == By::kGraph)
    graph = std::make_unique<Graph>(training.sharded(), &training.optimizer(),
                                    [&] { training.step(); });
  Result result;
  for (int number = 0; number < 12; ++number) {
    training.begin_step(number);
    graph ? graph->run() : training.step();
    result.losses.push_back(training.loss());
    // Before a step is recorded, and between replays: weights are fresh after it, and then are not.
    if (number % 4 == 2) result.validations.push_back(training.validate());
  }
  const auto whole = training.sharded().full_parameters();
  for (const at::Tensor& parameter : training.model().parameters())
    result.weights.push_back(parameter.cpu());
  return result;
}

void expect_same(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.validations, expected.validations);
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_TRUE(at::equal(actual.weights[i], expected.weights[i])) << "parameter " << i;
}

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
  const Result by_nccl = train(mesh, GetParam().strategy, By::kStep);
  Result by_threads;
  run_threads(world.size(), {.timeout_seconds = 60}, [&](World& threads) {
    Result result = train(threads.mesh({.outer = is_outer ? threads.size() : 1}),
                          GetParam().strategy, By::kStep);
    if (threads.rank() == world.rank()) by_threads = std::move(result);
  });
  expect_same(by_nccl, by_threads);
  expect_same(train(mesh, GetParam().strategy, By::kGraph), by_nccl);
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
      return train(mesh, "optim_grads_params", by, UserBuffers::kOff, testing::aligned_mixtral());
    };
    const Mesh mesh = world.mesh(axes);
    const Result by_nccl = trained(mesh, By::kStep);
    EXPECT_LT(by_nccl.losses.back(), by_nccl.losses.front());
    Result by_threads;
    run_threads(2, {.timeout_seconds = 60}, [&](World& threads) {
      Result result = trained(threads.mesh(axes), By::kStep);
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
  SmallTraining plain(mesh, "optim");
  SmallTraining training(mesh, "optim");
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

// The same cases that run over MPI and TCP.
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

// --- user buffers --------------------------------------------------------------------------------

class InPlace : public ::testing::TestWithParam<UserBuffers> {};

TEST_P(InPlace, TrainsWithTheSameBits) {
  FSDP_REQUIRE_GPU();
  const Mesh& mesh = shared_ranks->mesh();
  const std::string strategy = "optim_grads_params";
  const Result copied = train(mesh, strategy, By::kStep);
  ::testing::internal::CaptureStderr();
  const Result in_place = train(mesh, strategy, By::kStep, GetParam());
  const std::string said = ::testing::internal::GetCapturedStderr();
  expect_same(in_place, copied);
  expect_same(train(mesh, strategy, By::kGraph, GetParam()), copied);
  if (mesh.inner().rank() == 0) {
    std::fputs(said.c_str(), stdout);
    EXPECT_THAT(said, ::testing::HasSubstr("user buffers: "));
    EXPECT_THAT(said, ::testing::HasSubstr(nccl_version()));
    EXPECT_THAT(said, ::testing::HasSubstr("all_gather " + std::string(name_of(GetParam()))));
    EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("copied")));
  }
  shared_ranks->world().communicator().barrier("end of case").wait();
}

// Bytes that NCCL says it has registered, by its own log.
int64_t bytes_registered_by_nccl() {
  const std::string log = read_text_file(nccl_log_path(), int64_t{1} << 30);
  int64_t bytes = 0;
  for (size_t at = log.find("register comm "); at != std::string::npos;
       at = log.find("register comm ", at + 1))
    bytes += std::stoll(log.substr(log.find(" size ", at) + 6));
  return bytes;
}

// Shards, slabs, casts and what reductions receive in, along both axes: both ends of a collective
// must be known to NCCL, or it uses neither in place.
TEST_P(InPlace, CoversAllThatCollectivesTouch) {
  FSDP_REQUIRE_GPU();
  using Along = TrainingCase::Along;
  for (const TrainingCase& each :
       {TrainingCase{"zero3", "optim_grads_params"}, TrainingCase{"zero1", "optim"},
        TrainingCase{"no_shard", "no_shard"},
        TrainingCase{"hsdp", "optim_grads_params", Along::kOuter},
        TrainingCase{"hfsdp", "optim_grads_params+hfsdp", Along::kOuter}}) {
    SCOPED_TRACE(each.name);
    const Mesh& mesh =
        each.ranks == Along::kOuter ? shared_ranks->outer_mesh() : shared_ranks->mesh();
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      const int64_t before = bytes_registered_by_nccl();
      SmallTraining training(mesh, each.strategy, GetParam(), wire);
      for (int number = 0; number < 4; ++number) {
        training.begin_step(number);
        training.step();
      }
      training.loss();
      EXPECT_GT(bytes_registered_by_nccl(), before);
      int num_kinds = 0;
      for (const MeshAxis* axis : {&mesh.inner(), &mesh.outer()})
        for (const Communicator* ranks : {&axis->gather(), &axis->reduce()})
          for (const auto& [kind, use] : ranks->used_buffers()) {
            EXPECT_GE(use, UserBuffers::kRegistered) << ranks->name() << " " << name_of(kind);
            ++num_kinds;
          }
      // One rank sends nothing: its sums read their input in place.
      if (shared_ranks->world().size() > 1) {
        EXPECT_GE(num_kinds, each.strategy == "no_shard" ? 1 : 2);
      }
    }
  }
  shared_ranks->world().communicator().barrier("end of case").wait();
}

// Registered, used, deregistered and freed again and again, beside operations that go on.
TEST_P(InPlace, MemoryComesAndGoes) {
  FSDP_REQUIRE_GPU();
  Communicator& comm = shared_ranks->mesh().inner().gather();
  const int64_t numel = 1 << 20;
  const int64_t bytes = numel * comm.size() * 4;
  const auto floats = at::device(kGpu).dtype(at::kFloat);
  const at::Tensor share = at::full({numel}, 1.0 + comm.rank(), floats);
  for (int round = 0; round < 4; ++round) {
    void* memory = nccl_allocate(bytes);
    const RegisteredMemory became = comm.register_memory(memory, bytes, GetParam());
    EXPECT_TRUE(became.use == GetParam() || !became.why_not_better.empty());
    {
      const at::Tensor whole = at::from_blob(memory, {numel * comm.size()}, floats);
      comm.all_gather(whole, share, "in place").wait();
      for (int rank = 0; rank < comm.size(); ++rank)
        EXPECT_TRUE((whole.narrow(0, rank * numel, numel) == 1.0 + rank).all().item<bool>());
    }
    comm.deregister_memory(memory);
    nccl_deallocate(memory);
  }
  comm.barrier("end of case").wait();
}

INSTANTIATE_TEST_SUITE_P(Uses, InPlace,
                         ::testing::Values(UserBuffers::kRegistered, UserBuffers::kSymmetric),
                         [](const auto& test) { return name_of(test.param); });

// What NCCL adds: whole numbers, which are exact in any order.
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
  setenv("NCCL_DEBUG_FILE", fsdp::nccl_log_path().c_str(), 1);
  const fsdp::World keeps_the_job_alive =
      fsdp::testing::join_processes(fsdp::CommOptions::from_environment());
  ::testing::AddGlobalTestEnvironment(fsdp::shared_ranks);
  return RUN_ALL_TESTS();
}
