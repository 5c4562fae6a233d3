// A sharded model gives the same numbers as a plain one.
#include "fsdp/shard/fully_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/unit.h"
#include "support/run_ranks.h"

namespace fsdp::fully_shard_test {
namespace {

using testing::run_ranks;

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out)
      : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

struct MlpImpl : torch::nn::Module {
  MlpImpl()
      : first(register_module("first", Unit<Block>(5, 7))),
        second(register_module("second", Unit<Block>(7, 11))),
        third(register_module("third", Unit<Block>(11, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return third(second(first(x))); }
  Unit<Block> first;
  Unit<Block> second;
  Unit<Block> third;
};
TORCH_MODULE(Mlp);

Mlp make_mlp() {
  torch::manual_seed(7);
  return Mlp();
}

std::vector<at::Tensor> plain_weights(int ranks, int steps) {
  Mlp model = make_mlp();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      const at::Tensor x = at::full({2, 5}, 0.1 * (rank + 1) + step);
      (model(x).square().mean() / ranks).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

class Strategies : public ::testing::TestWithParam<std::tuple<std::string, int, int>> {};

TEST_P(Strategies, TrainLikeAPlainModel) {
  const auto& [strategy, outer, inner] = GetParam();
  const int ranks = outer * inner;
  const int steps = 4;
  const std::vector<at::Tensor> expected = plain_weights(ranks, steps);
  run_ranks(ranks, [&, outer = outer, strategy = strategy](World& world) {
    const Mesh mesh = world.mesh({.outer = outer});
    static std::mutex seed;
    Mlp model = nullptr;
    {
      const std::lock_guard lock(seed);
      model = make_mlp();
    }
    Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(strategy)});
    for (int step = 0; step < steps; ++step) {
      const at::Tensor x = at::full({2, 5}, 0.1 * (world.rank() + 1) + step);
      model(x).square().mean().backward();
      for (const FlatShard& shard : sharded.flat_shards())
        shard.main_weight.sub_(shard.gradient, 0.1);
      sharded.refresh_weights();
      sharded.zero_grad();
    }
    const auto whole = sharded.full_parameters();
    const std::vector<at::Tensor> actual = model->parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << i << "\n"
                                                                    << actual[i] << "\n"
                                                                    << expected[i];
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, Strategies,
    ::testing::Combine(::testing::Values("no_shard", "optim", "optim_grads", "optim_grads_params",
                                         "optim+hfsdp", "optim_grads+hfsdp",
                                         "optim_grads_params+hfsdp", "RS/PP/SS", "SS/SS/SS"),
                       ::testing::Values(1, 2), ::testing::Values(1, 2, 3)));

TEST(ComputeType, LeavesMainWeightsUnrounded) {
  const std::vector<at::Tensor> whole = make_mlp()->parameters();
  for (const MainStorage storage : all_main_storages())
    for (const char* strategy : {"no_shard", "optim", "optim_grads_params"})
      run_ranks(2, [&](World& world) {
        const Mesh mesh = world.mesh();
        Mlp model = Mlp();
        {
          const at::NoGradGuard no_grad;
          for (size_t i = 0; i < whole.size(); ++i) model->parameters()[i].copy_(whole[i]);
        }
        const Sharded sharded =
            fully_shard(model, mesh,
                        {.strategy = parse_strategy(strategy),
                         .precision = {.params = at::kBFloat16, .main_storage = storage}});
        const std::vector<ShardedParameter> parts = sharded.parameters();
        for (size_t i = 0; i < parts.size(); ++i)
          EXPECT_TRUE(
              at::equal(parts[i].main_weight,
                        whole[i].flatten().narrow(0, parts[i].begin, parts[i].main_weight.numel())))
              << strategy << " " << name_of(storage) << " " << parts[i].name;
        const auto guard = sharded.full_parameters();
        for (size_t i = 0; i < whole.size(); ++i)
          EXPECT_TRUE(at::equal(model->parameters()[i], whole[i].to(at::kBFloat16)));
      });
}

TEST(FullParameters, OfOneUnitLeaveTheOthersSharded) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Mlp model = Mlp();
    const Sharded sharded =
        fully_shard(model, mesh, {.initial_values = InitialValues::kOfRankZero});
    const auto second = sharded.full_parameters(Sharded::Access::kRead, {"second"});
    EXPECT_TRUE(model->second->linear->weight.isfinite().all().item<bool>());
    for (const auto& unit : EngineAccess::of(sharded).units())
      EXPECT_EQ(unit->phase() == WeightPhase::kResting, unit->name() != "second") << unit->name();
    EXPECT_THAT(
        [&] { static_cast<void>(sharded.full_parameters(Sharded::Access::kRead, {"none"})); },
        ::testing::ThrowsMessage<Error>(::testing::HasSubstr("none")));
  });
}

// Rank r's values are all r.
Mlp make_mlp_of(float value) {
  Mlp model;
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) parameter.fill_(value);
  return model;
}

TEST(InitialValues, ThatDifferBetweenRanksAreAnErrorThatNamesTheParameter) {
  run_ranks(3, [](World& world) {
    const Mesh mesh = world.mesh();
    Mlp model = make_mlp_of(static_cast<float>(world.rank()));
    try {
      fully_shard(model, mesh);
      FAIL() << "different values were taken";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("'first.linear.weight'"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("kOfRankZero"));
    }
  });
}

TEST(InitialValues, OfRankZeroReachEveryRankOfAMesh) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2});
    Mlp model = make_mlp_of(static_cast<float>(world.rank() + 5));
    const Sharded sharded =
        fully_shard(model, mesh, {.initial_values = InitialValues::kOfRankZero});
    const auto whole = sharded.full_parameters();
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_TRUE(parameter.eq(5.0).all().item<bool>()) << "rank " << world.rank();
  });
}

}  // namespace
}  // namespace fsdp::fully_shard_test
