// Known defects of other sharded training systems, one test each. The numbers are those of the list
// the project was specified with.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/shard/fully_shard.h"
#include "support/chain_model.h"
#include "support/counting_allocator.h"
#include "support/run_ranks.h"

namespace fsdp::defects_test {
namespace {

using testing::Chain;
using ::testing::HasSubstr;
using testing::run_ranks;

Chain make_chain(std::vector<int64_t> numels) { return Chain(numels); }

void expect_gradients(const Sharded& sharded, double expected) {
  for (const ShardedParameter& parameter : sharded.parameters()) {
    if (!parameter.is_trainable) continue;
    EXPECT_TRUE(parameter.gradient.eq(expected).all().item<bool>())
        << parameter.name << ": " << parameter.gradient << ", expected " << expected;
  }
}

// HFSDP: the mean was taken over the inner ranks only.
TEST(Defect10_1_1, HfsdpDividesByAllRanks) {
  for (const char* strategy : {"optim+hfsdp", "optim_grads+hfsdp", "optim_grads_params+hfsdp"})
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = 2});
      Chain chain = make_chain({37, 5});
      const Sharded sharded = fully_shard(chain, mesh, {.strategy = parse_strategy(strategy)});
      chain(1.0 + world.rank()).backward();
      expect_gradients(sharded, (1.0 + 2.0 + 3.0 + 4.0) / 4);
    });
}

// Groups of one rank scaled a gradient once per microbatch, or added it twice with a wire type of
// its own.
TEST(Defect10_1_2, GroupsOfOneRankAreExact) {
  for (const int outer : {1, 2})
    run_ranks(outer, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = outer});
      Chain chain = make_chain({37, 5});
      const Sharded sharded = fully_shard(chain, mesh, {.precision = {.grad_comm = at::kBFloat16}});
      for (int i = 0; i < 3; ++i) {
        sharded.microbatch({.last = i == 2});
        chain(1.0 + world.rank()).backward();
      }
      expect_gradients(sharded, outer == 1 ? 3.0 : 4.5);
    });
}

// Averaging inside the collective and outside it were two code paths with two scales.
TEST(Defect10_1_3, EveryReductionIsASumThatIsDividedOnce) {
  for (const Strategy& strategy : named_strategies())
    for (const int outer : {1, 2}) {
      const auto recording = std::make_shared<Recording>();
      World world = World::simulated(0, 4, recording);
      const Mesh mesh = world.mesh({.outer = outer});
      Chain chain = make_chain({37, 5});
      const Sharded sharded = fully_shard(chain, mesh, {.strategy = strategy});
      recording->clear();
      chain(1.0).backward();
      sharded.wait_gradients();
      double product = 1.0;
      for (const RecordedCall& call : *recording) {
        if (call.print.kind == OpKind::kAllGather) continue;
        EXPECT_EQ(call.print.reduce, ReduceOp::kSum) << call.print.text();
        product *= call.print.scale;
      }
      EXPECT_EQ(product, 0.25 * 0.25) << to_text(strategy) << ": two units, each divided by 4";
    }
}

// A change of the wire type between steps had the opposite effect.
TEST(Defect10_1_4, AChangedWireTypeIsTheOneThatTravels) {
  const auto recording = std::make_shared<Recording>();
  World world = World::simulated(0, 4, recording);
  const Mesh mesh = world.mesh();
  Chain chain = make_chain({37, 5});
  const Sharded sharded = fully_shard(chain, mesh, {.pool = PoolKind::kOnDemand});
  for (const at::ScalarType wire : {at::kBFloat16, at::kFloat, at::kBFloat16}) {
    sharded.set_precision({.grad_comm = wire});
    recording->clear();
    chain(1.0).backward();
    sharded.zero_grad();
    int num_reductions = 0;
    for (const RecordedCall& call : *recording) {
      if (call.print.kind != OpKind::kReduceScatter) continue;
      ++num_reductions;
      EXPECT_EQ(call.print.wire, wire) << call.print.text();
    }
    EXPECT_EQ(num_reductions, 2);
  }
}

// Without overlap no_shard and optim skipped the outer axis and the wire type, and frozen groups
// made optim crash.
TEST(Defect10_1_6, WholeGradientsCrossTheOuterAxisInTheWireType) {
  for (const char* strategy : {"no_shard", "optim", "optim+hfsdp"}) {
    const auto recording = std::make_shared<Recording>();
    World world = World::simulated(0, 4, recording);
    const Mesh mesh = world.mesh({.outer = 2});
    Chain chain = make_chain({37, 5});
    chain->links[1]->weight.set_requires_grad(false);
    const Sharded sharded = fully_shard(
        chain, mesh,
        {.strategy = parse_strategy(strategy), .precision = {.grad_comm = at::kBFloat16}});
    recording->clear();
    chain(1.0).backward();
    sharded.wait_gradients();
    int num_outer = 0;
    for (const RecordedCall& call : *recording) {
      if (call.communicator.find("outer reduce") == std::string::npos) continue;
      ++num_outer;
      EXPECT_EQ(call.print.wire, at::kBFloat16) << call.print.text();
    }
    EXPECT_EQ(num_outer, 1) << strategy << ": one trainable unit";
  }
  for (const char* strategy : {"no_shard", "optim", "optim+hfsdp"})
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = 2});
      Chain chain = make_chain({37, 5});
      chain->links[1]->weight.set_requires_grad(false);
      const Sharded sharded = fully_shard(
          chain, mesh,
          {.strategy = parse_strategy(strategy), .precision = {.grad_comm = at::kBFloat16}});
      chain(1.0 + world.rank()).backward();
      expect_gradients(sharded, 2.5);
    });
}

// The search for NaN did nothing while reductions overlapped with computation.
TEST(Defect10_1_7, NanIsFoundWhileReductionsOverlap) {
  for (const Strategy& strategy : named_strategies())
    for (const int rank_with_nan : {-1, 3})
      run_ranks(4, [&](World& world) {
        const Mesh mesh = world.mesh({.outer = 2});
        Chain chain = make_chain({37, 5, 64});
        const Sharded sharded = fully_shard(chain, mesh, {.strategy = strategy});
        const double factor =
            world.rank() == rank_with_nan ? std::numeric_limits<double>::quiet_NaN() : 1.0;
        chain(factor).backward();
        EXPECT_EQ(sharded.found_nonfinite(), rank_with_nan >= 0) << to_text(strategy);
        sharded.zero_grad();
        chain(1.0).backward();
        EXPECT_FALSE(sharded.found_nonfinite()) << "the next step begins anew";
      });
}

TEST(Defect10_1_7, NanIsReportedWithItsParameter) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain chain = make_chain({37, 5});
    const Sharded sharded = fully_shard(chain, mesh, {.report_nan = ReportNan::kPerParameter});
    EXPECT_THAT([&] { chain(std::numeric_limits<double>::infinity()).backward(); },
                ::testing::ThrowsMessage<std::exception>(
                    ::testing::AllOf(HasSubstr("'link1.weight'"), HasSubstr("rank 0"))));
  });
}

// ZeRO-1 and 2 gathered ahead in the first step only.
TEST(Defect10_1_9, ForwardGathersAheadInEveryStep) {
  for (const Strategy& strategy : named_strategies()) {
    if (strategy.optimizer.inner != Placement::kShard) continue;  // nothing to gather
    const auto recording = std::make_shared<Recording>();
    World world = World::simulated(0, 4, recording);
    const Mesh mesh = world.mesh();
    Chain chain = make_chain({64, 64, 64, 64});
    const Sharded sharded = fully_shard(chain, mesh, {.strategy = strategy});
    std::vector<size_t> num_gathered;  // when each unit computes
    for (auto& link : chain->links)
      link->on_forward = [&] { num_gathered.push_back(recording->size()); };
    for (int step = 0; step < 4; ++step) {
      sharded.refresh_weights();
      recording->clear();
      num_gathered.clear();
      chain(1.0).backward();
      sharded.zero_grad();
      EXPECT_THAT(num_gathered, ::testing::ElementsAre(2, 3, 4, 4))
          << to_text(strategy) << ", step " << step << ": the unit itself and the next one";
    }
  }
}

// A wait for a unit with several groups waited for the last group only.
TEST(Defect10_1_10, AllGroupsOfAUnitAreThereWhenItComputes) {
  struct ManyGroupsImpl : torch::nn::Module {
    ManyGroupsImpl() {
      int64_t numel = 4096;
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
        for (const bool trainable : {true, false}) {
          const std::string name = concat("p", parameters(false).size());
          values.push_back(register_parameter(name, at::full({numel}, 1.0, type), trainable));
          numel /= 2;
        }
    }
    at::Tensor forward(const at::Tensor& expected) {
      at::Tensor loss = at::zeros({});
      for (const at::Tensor& value : values) {
        EXPECT_TRUE(value.eq(expected.item<double>()).all().item<bool>()) << value.scalar_type();
        loss = loss + value.to(at::kFloat).sum();
      }
      return loss;
    }
    std::vector<at::Tensor> values;
  };
  run_ranks(3, [](World& world) {
    const Mesh mesh = world.mesh();
    Unit<ManyGroupsImpl> unit;
    const Sharded sharded = fully_shard(unit, mesh, {.precision = {.main_params = std::nullopt}});
    for (int step = 0; step < 3; ++step) {
      unit(at::full({}, 1.0 + step)).backward();
      sharded.zero_grad();
      for (const ShardedParameter& parameter : sharded.parameters())
        parameter.main_weight.add_(1.0);
      sharded.refresh_weights();
    }
  });
}

// Pools were planned with sizes without padding, and memory was taken with it.
TEST(Defect10_1_15, PoolsArePlannedWithPaddedSizes) {
  for (const PoolKind pool : all_pool_kinds())
    run_ranks(4, [&](World& world) {
      const Mesh mesh = world.mesh();
      // Two elements on four ranks: nearly everything is padding.
      testing::CountingHostAllocator allocator;  // outlives the model, whose units hold its memory
      Chain chain = make_chain({2, 1, 3, 2, 1});
      const Sharded sharded = fully_shard(chain, mesh, {.pool = pool, .allocator = &allocator});
      std::vector<int64_t> peaks;
      for (int step = 0; step < 4; ++step) {
        allocator.restart_peak();
        chain(1.0 + world.rank()).backward();
        expect_gradients(sharded, 2.5);
        sharded.zero_grad();
        peaks.push_back(allocator.peak_bytes());
      }
      EXPECT_EQ(peaks, std::vector<int64_t>(4, peaks.front())) << "nothing grows";
      if (pool == PoolKind::kMaxPool || pool == PoolKind::kPlanned) {
        EXPECT_EQ(allocator.peak_bytes(), allocator.live_bytes()) << "all of it was taken at once";
      }
    });
}

}  // namespace
}  // namespace fsdp::defects_test
