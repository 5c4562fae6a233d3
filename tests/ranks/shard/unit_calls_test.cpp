// However often and in whatever order units are called, they train like the plain model.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"

namespace fsdp::unit_calls_test {
namespace {

using testing::Block;
using testing::build;
using testing::Chain;
using testing::expect_trains_like_plain;
using testing::input_for;
using testing::kSquare;
using testing::maker;
using testing::nothing_is_held;
using testing::run_ranks;

// --- without gradients ---------------------------------------------------------------------------

TEST(UnitCalls, WithoutGradientsGiveTheSameAndLetTheirWeightsGo) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain plain = build([] { return Chain(4); });
    Chain model = build([] { return Chain(4); });
    Sharded sharded = fully_shard(model, mesh);
    model->eval();
    for (int round = 0; round < 3; ++round) {
      {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(model(input_for(0, round)), plain(input_for(0, round))));
      }
      {
        const c10::InferenceMode inference;
        const at::Tensor out = model(input_for(0, round));
        EXPECT_TRUE(out.is_inference());
        EXPECT_TRUE(at::equal(out, plain(input_for(0, round))));
      }
      EXPECT_TRUE(nothing_is_held(sharded)) << "round " << round;
    }
  });
}

TEST(UnitCalls, WithoutGradientsDoNotDisturbTraining) {
  const auto between = [](Chain& model) {
    const at::NoGradGuard no_grad;
    model(input_for(0, 0));
    model->units[2](input_for(0, 0, {2, 7}));  // and of single units
    model->units[1](input_for(0, 0, {2, 7}));
    const c10::InferenceMode inference;
    model(input_for(0, 0));
  };
  const auto expected = testing::train_plain(build([] { return Chain(4); }), 2, 3, kSquare);
  for (const PoolKind kind : all_pool_kinds()) {
    testing::on_sharded(
        2, [] { return Chain(4); }, {.pool = kind},
        [&](Chain& model, Sharded& sharded, int rank) {
          for (int step = 0; step < 3; ++step) {
            between(model);
            const at::Tensor loss = kSquare(model, rank, step);
            between(model);
            loss.backward();
            between(model);
            testing::descend(sharded);
          }
          const bool is_fixed = kind == PoolKind::kMaxPool || kind == PoolKind::kPlanned;
          EXPECT_TRUE(!is_fixed ||
                      EngineAccess::of(sharded).weights().pool()->addresses_are_fixed())
              << name_of(kind);
          EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0) << name_of(kind);
          testing::expect_equal(testing::weights_of(sharded, model), expected,
                                std::string(name_of(kind)));
        });
  }
}

TEST(UnitCalls, WithGradientsButWithoutBackwardAreForgotten) {
  const auto expected = testing::train_plain(build([] { return Chain(4); }), 2, 3, kSquare);
  testing::on_sharded(
      2, [] { return Chain(4); }, {},
      [&](Chain& model, Sharded& sharded, int rank) {
        for (int step = 0; step < 3; ++step) {
          model(input_for(0, 9));
          model(input_for(0, 8));
          kSquare(model, rank, step).backward();
          testing::descend(sharded);
        }
        EXPECT_EQ(EngineAccess::of(sharded).weights().num_misses(), 0);
        testing::expect_equal(testing::weights_of(sharded, model), expected);
      });
}

// --- several times -------------------------------------------------------------------------------

// One unit: the second backward's gradients follow the first one's into the same memory.
const std::vector<std::pair<Strategy, int>> kCases = {{Strategy::optim, 1},
                                                      {Strategy::optim, 4},
                                                      {Strategy::optim_grads_params, 1},
                                                      {Strategy::optim_grads_params, 4}};

TEST(UnitCalls, OfTwoForwardsBeforeTwoBackwardsAddUp) {
  const auto sum = [](Chain& model, int rank, int step) {
    return kSquare(model, rank, step) + kSquare(model, rank, step + 10);
  };
  // With an outer axis the first backward's reductions have a second stage, which must not start
  // while the cycle goes on.
  for (const int outer : {1, 2}) {
    for (const auto& [strategy, num_units] : kCases) {
      const auto make = [&, num_units = num_units] { return Chain(num_units); };
      const auto expected = testing::train_plain(build(make), 2 * outer, 3, sum);
      run_ranks(2 * outer, [&, strategy = strategy](World& world) {
        const Mesh mesh = world.mesh({.outer = outer});
        Chain model = build(make);
        Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
        for (int step = 0; step < 3; ++step) {
          const at::Tensor one = kSquare(model, world.rank(), step);
          const at::Tensor two = kSquare(model, world.rank(), step + 10);
          sharded.microbatch({.last = false});
          one.backward();
          sharded.microbatch({.last = true});
          two.backward();
          testing::descend(sharded);
        }
        testing::expect_close(testing::weights_of(sharded, model), expected, to_text(strategy));
      });
    }
  }
}

// Three steps of two backwards through one graph each: twice the gradient of one.
template <typename Model>
void train_with_two_backwards(Model& model, Sharded& sharded, int rank) {
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = kSquare(model, rank, step);
    {
      const auto guard = sharded.no_sync();
      loss.backward({}, /*retain_graph=*/true);
    }
    loss.backward();
    testing::descend(sharded);
  }
}

// Twice the gradient of one backward, sharded by each strategy that takes another way.
template <typename Make>
void expect_two_backwards_add_up(const Make& make) {
  const auto expected = testing::train_plain(
      build(make), 2, 3,
      [](auto& model, int rank, int step) { return 2 * kSquare(model, rank, step); });
  for (const Strategy& strategy : {Strategy::optim, Strategy::optim_grads_params}) {
    testing::on_sharded(
        2, make, {.strategy = strategy}, [&](auto& model, Sharded& sharded, int rank) {
          train_with_two_backwards(model, sharded, rank);
          testing::expect_close(testing::weights_of(sharded, model), expected, to_text(strategy));
        });
  }
}

TEST(UnitCalls, OfTwoBackwardsThroughOneGraphAddUp) {
  for (const int num_units : {1, 4}) expect_two_backwards_add_up([&] { return Chain(num_units); });
}

struct CalledTwiceImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return third(first(second(first(x)))); }
  Unit<Block> first = register_module("first", Unit<Block>(5, 5));
  Unit<Block> second = register_module("second", Unit<Block>(5, 5));
  Unit<Block> third = register_module("third", Unit<Block>(5, 3));
};

TEST(UnitCalls, TwiceInOneStepTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<CalledTwiceImpl>(), kSquare);
}

TEST(UnitCalls, TwiceInOneStepTakeARepeatedBackward) {
  expect_two_backwards_add_up(maker<CalledTwiceImpl>());
}

// One unit's result is not used, and one unit is never called.
struct IdleImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = first(x);
    kept = side(y);
    return third(y);
  }
  Unit<Block> first = register_module("first", Unit<Block>(5, 5));
  Unit<Block> side = register_module("side", Unit<Block>(5, 5));
  Unit<Block> never = register_module("never", Unit<Block>(40, 40));
  Unit<Block> third = register_module("third", Unit<Block>(5, 3));
  at::Tensor kept;
};

TEST(UnitCalls, ThatNeverHappenOrAreNotUsedDoNoHarm) {
  expect_trains_like_plain(maker<IdleImpl>(), kSquare);
}

}  // namespace
}  // namespace fsdp::unit_calls_test
