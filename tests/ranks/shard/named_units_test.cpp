// Units that are named in the options and called by call_unit(), in modules that stay as they are.
#include "fsdp/shard/call_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/base/error.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/fully_shard.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"

namespace fsdp::named_units_test {
namespace {

using testing::Block;
using testing::BlockImpl;
using testing::build;
using ::testing::ElementsAre;
using testing::expect_trains_like_plain;
using ::testing::HasSubstr;
using testing::input_for;
using testing::kSquare;
using testing::maker;
using testing::run_ranks;

// The caller is ours, the layers are somebody else's.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : layers(register_module("layers", torch::nn::ModuleList())),
        tower(register_module("tower", torch::nn::Sequential(Block(5, 7), Block(7, 5)))),
        head(register_module("head", torch::nn::Linear(5, 3))) {
    for (int i = 0; i < 3; ++i) layers->push_back(Block(5, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = call_unit(*layer->as<BlockImpl>(), x);
    x = call_unit(tower, x);
    return call_unit(head, x);
  }
  torch::nn::ModuleList layers;
  torch::nn::Sequential tower;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

TEST(NamedUnits, TrainLikeAPlainModel) {
  expect_trains_like_plain(maker<NetImpl>(), kSquare, 3, {"layers.*", "tower", "head"});
  expect_trains_like_plain(maker<NetImpl>(), kSquare, 3, {"layers.?"});
}

// Weights that stay whole would train as well.
TEST(NamedUnits, AreShardedAndNotTheModulesInside) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Net net = build([] { return Net(); });
    const Sharded sharded = fully_shard(net, mesh, {.units = {"layers.*", "tower"}});
    EXPECT_THAT(sharded.unit_names(),
                ElementsAre("layers.0", "layers.1", "layers.2", "tower", "(outside units)"));
    int64_t held = 0;
    int64_t all = 0;
    for (const ShardedParameter& parameter : sharded.parameters()) {
      held += parameter.main_weight.numel();
      all += c10::multiply_integers(parameter.shape);
    }
    EXPECT_LT(held, all * 3 / 4);
    for (const auto& unit : EngineAccess::of(sharded).units())
      EXPECT_EQ(unit->phase() == WeightPhase::kResting, unit->kind() == UnitKind::kScheduled)
          << unit->name();
  });
}

TEST(NamedUnits, WithANameThatNobodyHasAreAnErrorWithAGuess) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    EXPECT_THAT(testing::error_of([&] { fully_shard(Net(), mesh, {.units = {"layer.*"}}); }),
                HasSubstr("units has 'layer.*', but no module of the model is called so; did you "
                          "mean 'layers.0'?"));
  });
}

TEST(NamedUnits, AreShardedOnceAndForgottenWithTheSharded) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Net net;
    {
      const Sharded sharded = fully_shard(net, mesh, {.units = {"head"}});
      EXPECT_NE(named_unit_hooks(*net->head), nullptr);
      EXPECT_THROW(fully_shard(net, mesh, {.units = {"head"}}), Error);
    }
    EXPECT_EQ(named_unit_hooks(*net->head), nullptr);
  });
}

}  // namespace
}  // namespace fsdp::named_units_test
