// A sharded model gives the same numbers as a plain one.
#include "fsdp/shard/fully_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/trains_like_plain.h"

namespace fsdp::fully_shard_test {
namespace {

using testing::build;
using testing::Chain;
using testing::kSquare;
using testing::run_ranks;

Chain make_chain() {
  return build([] { return Chain(3); });
}

TEST(ComputeType, LeavesMainWeightsUnrounded) {
  const std::vector<at::Tensor> whole = make_chain()->parameters();
  for (const MainStorage storage : all_main_storages())
    for (const char* strategy : {"no_shard", "optim", "optim_grads_params"})
      run_ranks(2, [&](World& world) {
        const Mesh mesh = world.mesh();
        Chain model = make_chain();
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
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    const auto second = sharded.full_parameters(Sharded::Access::kRead, {"unit1"});
    EXPECT_TRUE(model->units[1]->linear->weight.isfinite().all().item<bool>());
    for (const auto& unit : EngineAccess::of(sharded).units())
      EXPECT_EQ(unit->phase() == WeightPhase::kResting, unit->name() != "unit1") << unit->name();
    EXPECT_THAT(testing::error_of([&] {
                  static_cast<void>(sharded.full_parameters(Sharded::Access::kRead, {"none"}));
                }),
                ::testing::HasSubstr("none"));
  });
}

// Rank r's values are all r.
Chain make_chain_of(float value) {
  Chain model = make_chain();
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) parameter.fill_(value);
  return model;
}

TEST(InitialValues, ThatDifferBetweenRanksAreAnErrorThatNamesTheParameter) {
  run_ranks(3, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain_of(static_cast<float>(world.rank()));
    EXPECT_THAT(testing::error_of([&] { fully_shard(model, mesh); }),
                ::testing::AllOf(::testing::HasSubstr("'unit0.linear.weight'"),
                                 ::testing::HasSubstr("kOfRankZero")));
  });
}

TEST(InitialValues, OfRankZeroReachEveryRankOfAMesh) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2});
    Chain model = make_chain_of(static_cast<float>(world.rank() + 5));
    const Sharded sharded =
        fully_shard(model, mesh, {.initial_values = InitialValues::kOfRankZero});
    const auto whole = sharded.full_parameters();
    for (const at::Tensor& parameter : model->parameters())
      EXPECT_TRUE(parameter.eq(5.0).all().item<bool>()) << "rank " << world.rank();
  });
}

}  // namespace
}  // namespace fsdp::fully_shard_test
