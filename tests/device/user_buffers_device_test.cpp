// Memory that NCCL uses in place: all that collectives touch is registered, once, and the numbers
// are those of memory that it copies through its own. Started with nccl_device_test.cpp.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/shard/engine/engine.h"
#include "support/require.h"
#include "support/shared_nccl_ranks.h"

namespace fsdp::user_buffers_device_test {
namespace {

using testing::By;
using testing::expect_same;
using testing::kGpu;
using testing::nccl_log_path;
using testing::shared_ranks;
using testing::SmallOptions;
using testing::SmallResult;
using testing::SmallTraining;
using testing::train_small;

// A strategy, and the axis along which all ranks lie.
struct StrategyCase {
  std::string name;
  std::string strategy;
  enum class Along { kInner, kOuter } ranks = Along::kInner;

  const Mesh& mesh() const {
    return ranks == Along::kOuter ? shared_ranks->outer_mesh() : shared_ranks->mesh();
  }
};

StrategyCase zero3() { return {"zero3", "optim_grads_params"}; }

std::vector<StrategyCase> hybrids() {
  return {{"hsdp", "optim_grads_params", StrategyCase::Along::kOuter},
          {"hfsdp", "optim_grads_params+hfsdp", StrategyCase::Along::kOuter}};
}

std::vector<StrategyCase> all_strategies() {
  std::vector<StrategyCase> all = {zero3(), {"zero1", "optim"}, {"no_shard", "no_shard"}};
  for (StrategyCase& hybrid : hybrids()) all.push_back(std::move(hybrid));
  return all;
}

// Steps [first, end); the loss of each.
std::vector<double> train_steps(SmallTraining& training, int first, int end) {
  std::vector<double> losses;
  for (int number = first; number < end; ++number) {
    training.begin_step(number);
    training.step();
    losses.push_back(training.loss());
  }
  return losses;
}

// Collectives of at least so many kinds have used registered memory at both ends, and none has used
// other memory.
void expect_all_in_place(const Mesh& mesh, int min_kinds) {
  int num_kinds = 0;
  for (const MeshAxis* axis : {&mesh.inner(), &mesh.outer()})
    for (Communicator* ranks : {&axis->gather(), &axis->reduce()})
      for (const auto& [kind, use] : ranks->nccl()->used_buffers()) {
        EXPECT_GE(use, UserBuffers::kRegistered) << ranks->name() << " " << name_of(kind);
        ++num_kinds;
      }
  // One rank sends nothing: its sums read their input in place.
  if (shared_ranks->world().size() > 1) {
    EXPECT_GE(num_kinds, min_kinds);
  }
}

// Steps alone: reading whole weights takes memory that is not registered.
void expect_steps_in_place(const Mesh& mesh, const SmallOptions& options, int min_kinds) {
  SmallTraining training(mesh, options);
  train_steps(training, 0, 4);
  expect_all_in_place(mesh, min_kinds);
}

void end_case() { shared_ranks->world().communicator().barrier("end of case").wait(); }

class InPlace : public ::testing::TestWithParam<UserBuffers> {};

TEST_P(InPlace, TrainsWithTheSameBits) {
  FSDP_REQUIRE_GPU();
  const Mesh& mesh = shared_ranks->mesh();
  const SmallResult copied = train_small(mesh, {}, By::kStep);
  ::testing::internal::CaptureStderr();
  const SmallResult in_place = train_small(mesh, {.user_buffers = GetParam()}, By::kStep);
  const std::string said = ::testing::internal::GetCapturedStderr();
  expect_same(in_place, copied);
  expect_same(train_small(mesh, {.user_buffers = GetParam()}, By::kGraph), copied);
  if (mesh.inner().rank() == 0) {
    std::fputs(said.c_str(), stdout);
    EXPECT_THAT(said, ::testing::HasSubstr("user buffers: "));
    EXPECT_THAT(said, ::testing::HasSubstr(nccl_version()));
    EXPECT_THAT(said, ::testing::HasSubstr("all_gather " + std::string(name_of(GetParam()))));
    EXPECT_THAT(said, ::testing::Not(::testing::HasSubstr("copied")));
  }
  end_case();
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
  for (const StrategyCase& each : all_strategies()) {
    SCOPED_TRACE(each.name);
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      const int64_t before = bytes_registered_by_nccl();
      SmallTraining training(each.mesh(),
                             {.strategy = each.strategy, .user_buffers = GetParam(), .wire = wire});
      train_steps(training, 0, 4);
      EXPECT_GT(bytes_registered_by_nccl(), before);
      expect_all_in_place(each.mesh(), each.strategy == "no_shard" ? 1 : 2);
    }
  }
  end_case();
}

// Rows and columns of ranks: shards are gathered along one axis, and gradients reduced along both.
TEST_P(InPlace, TrainsHybridsWithTheSameBits) {
  FSDP_REQUIRE_GPU();
  for (const StrategyCase& each : hybrids()) {
    SCOPED_TRACE(each.name);
    const SmallResult copied = train_small(each.mesh(), {.strategy = each.strategy}, By::kStep);
    const SmallOptions in_place{.strategy = each.strategy, .user_buffers = GetParam()};
    expect_same(train_small(each.mesh(), in_place, By::kStep), copied);
    expect_same(train_small(each.mesh(), in_place, By::kGraph), copied);
  }
  end_case();
}

TEST_P(InPlace, TrainsOnAGridOfTwoByTwoWithTheSameBits) {
  FSDP_REQUIRE_GPU();
  World& world = shared_ranks->world();
  if (world.size() != 4) GTEST_SKIP() << "for four ranks";
  const Mesh mesh = world.mesh({.outer = 2});
  for (const StrategyCase& each : hybrids()) {
    SCOPED_TRACE(each.name);
    const SmallResult copied = train_small(mesh, {.strategy = each.strategy}, By::kStep);
    const SmallOptions in_place{.strategy = each.strategy, .user_buffers = GetParam()};
    expect_same(train_small(mesh, in_place, By::kStep), copied);
    expect_steps_in_place(mesh, in_place, 3);
  }
  end_case();
}

// Weights are their own main weights, and activations are fp32.
TEST_P(InPlace, TrainsInFp32WithTheSameBits) {
  FSDP_REQUIRE_GPU();
  for (const StrategyCase& each : {zero3(), hybrids().front()}) {
    SCOPED_TRACE(each.name);
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      SmallOptions options{.strategy = each.strategy, .wire = wire, .compute = at::kFloat};
      const SmallResult copied = train_small(each.mesh(), options, By::kStep);
      EXPECT_LT(copied.losses.back(), copied.losses.front());
      options.user_buffers = GetParam();
      expect_same(train_small(each.mesh(), options, By::kStep), copied);
      expect_steps_in_place(each.mesh(), options, 2);
    }
  }
  end_case();
}

// Three steps with each type on the wire; the first one again at last.
SmallResult train_with_wires(const StrategyCase& each, UserBuffers use, at::ScalarType other_wire) {
  SmallTraining training(each.mesh(), {.strategy = each.strategy, .user_buffers = use});
  SmallResult result;
  int number = 0;
  for (const at::ScalarType wire : {at::kFloat, other_wire, at::kFloat}) {
    training.sharded().set_precision({.main_grads = at::kFloat, .grad_comm = wire});
    for (const double loss : train_steps(training, number, number + 3))
      result.losses.push_back(loss);
    number += 3;
    if (use != UserBuffers::kOff) expect_all_in_place(each.mesh(), 2);
  }
  result.weights = testing::whole_weights(training);
  return result;
}

// The memory of casts before a last reduction comes and goes with the type, and is registered
// again.
TEST_P(InPlace, FollowsATypeOnTheWireThatChanges) {
  FSDP_REQUIRE_GPU();
  for (const StrategyCase& each : {zero3(), hybrids().front()}) {
    SCOPED_TRACE(each.name);
    const SmallResult copied = train_with_wires(each, UserBuffers::kOff, at::kBFloat16);
    expect_same(train_with_wires(each, GetParam(), at::kBFloat16), copied);
    const SmallResult unchanged = train_with_wires(each, UserBuffers::kOff, at::kFloat);
    bool is_changed = false;
    for (size_t i = 0; i < copied.weights.size(); ++i)
      is_changed |= !at::equal(copied.weights[i], unchanged.weights[i]);
    EXPECT_TRUE(is_changed) << "another type on the wire rounds nothing";
  }
  end_case();
}

// Blocks are unlike the embedding and the head, which a double buffer would allocate around each
// use and so register in every step.
TEST_P(InPlace, RegistersADoubleBufferOnce) {
  FSDP_REQUIRE_GPU();
  const Mesh& mesh = shared_ranks->mesh();
  const SmallResult copied = train_small(mesh, {.pool = PoolKind::kDoubleBuffer}, By::kStep);
  const SmallOptions in_place{.user_buffers = GetParam(), .pool = PoolKind::kDoubleBuffer};
  expect_same(train_small(mesh, in_place, By::kStep), copied);
  SmallTraining training(mesh, in_place);
  train_steps(training, 0, 3);
  EXPECT_TRUE(EngineAccess::of(training.sharded()).weights().pool()->addresses_are_fixed());
  const int64_t registered = bytes_registered_by_nccl();
  EXPECT_GT(registered, 0);
  train_steps(training, 3, 10);
  EXPECT_EQ(bytes_registered_by_nccl(), registered);
  expect_all_in_place(mesh, 2);
  end_case();
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
    const RegisteredMemory became = comm.nccl()->register_memory(memory, bytes, GetParam());
    EXPECT_TRUE(became.use == GetParam() || !became.why_not_better.empty());
    {
      const at::Tensor whole = at::from_blob(memory, {numel * comm.size()}, floats);
      comm.all_gather(whole, share, "in place").wait();
      for (int rank = 0; rank < comm.size(); ++rank)
        EXPECT_TRUE((whole.narrow(0, rank * numel, numel) == 1.0 + rank).all().item<bool>());
    }
    comm.nccl()->deregister_memory(memory);
    nccl_deallocate(memory);
  }
  comm.barrier("end of case").wait();
}

INSTANTIATE_TEST_SUITE_P(Uses, InPlace,
                         ::testing::Values(UserBuffers::kRegistered, UserBuffers::kSymmetric),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace fsdp::user_buffers_device_test
