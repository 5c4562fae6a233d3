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

// `between` runs without gradients at several places of a step.
template <typename Between>
void expect_undisturbed(const Between& between) {
  const auto expected = testing::train_plain(build([] { return Chain(4); }), 2, 3, kSquare);
  for (const PoolKind kind : all_pool_kinds()) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      Chain model = build([] { return Chain(4); });
      Sharded sharded = fully_shard(model, mesh, {.pool = kind});
      for (int step = 0; step < 3; ++step) {
        between(model);
        const at::Tensor loss = kSquare(model, world.rank(), step);
        between(model);
        loss.backward();
        between(model);
        testing::descend(sharded);
      }
      const bool is_fixed = kind == PoolKind::kMaxPool || kind == PoolKind::kPlanned;
      EXPECT_TRUE(!is_fixed || EngineAccess::of(sharded).slabs().pool().addresses_are_fixed())
          << name_of(kind);
      EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0) << name_of(kind);
      testing::expect_equal(testing::weights_of(sharded, model), expected,
                            std::string(name_of(kind)));
    });
  }
}

TEST(UnitCalls, WithoutGradientsDoNotDisturbTraining) {
  expect_undisturbed([](Chain& model) {
    const at::NoGradGuard no_grad;
    model(input_for(0, 0));
  });
}

TEST(UnitCalls, InInferenceModeDoNotDisturbTraining) {
  expect_undisturbed([](Chain& model) {
    const c10::InferenceMode inference;
    model(input_for(0, 0));
  });
}

TEST(UnitCalls, OfSingleUnitsWithoutGradientsDoNotDisturbTraining) {
  expect_undisturbed([](Chain& model) {
    const at::NoGradGuard no_grad;
    model->units[2](input_for(0, 0, {2, 7}));
    model->units[1](input_for(0, 0, {2, 7}));
  });
}

TEST(UnitCalls, WithGradientsButWithoutBackwardAreForgotten) {
  const auto expected = testing::train_plain(build([] { return Chain(4); }), 2, 3, kSquare);
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = build([] { return Chain(4); });
    Sharded sharded = fully_shard(model, mesh);
    for (int step = 0; step < 3; ++step) {
      model(input_for(0, 9));
      model(input_for(0, 8));
      kSquare(model, world.rank(), step).backward();
      testing::descend(sharded);
    }
    EXPECT_EQ(EngineAccess::of(sharded).slabs().num_misses(), 0);
    testing::expect_equal(testing::weights_of(sharded, model), expected);
  });
}

// --- several times -------------------------------------------------------------------------------

TEST(UnitCalls, OfTwoForwardsBeforeOneBackwardAddUp) {
  expect_trains_like_plain([] { return Chain(4); },
                           [](Chain& model, int rank, int step) {
                             return kSquare(model, rank, step) + kSquare(model, rank, step + 10);
                           });
}

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

constexpr auto kTwiceTheSquare = [](auto& model, int rank, int step) {
  return 2 * kSquare(model, rank, step);
};

TEST(UnitCalls, OfTwoBackwardsThroughOneGraphAddUp) {
  for (const auto& [strategy, num_units] : kCases) {
    const auto make = [&, num_units = num_units] { return Chain(num_units); };
    const auto expected = testing::train_plain(build(make), 2, 3, kTwiceTheSquare);
    run_ranks(2, [&, strategy = strategy](World& world) {
      const Mesh mesh = world.mesh();
      Chain model = build(make);
      Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
      train_with_two_backwards(model, sharded, world.rank());
      testing::expect_close(testing::weights_of(sharded, model), expected, to_text(strategy));
    });
  }
}

struct CalledTwiceImpl : torch::nn::Module {
  CalledTwiceImpl()
      : first(register_module("first", Unit<Block>(5, 5))),
        second(register_module("second", Unit<Block>(5, 5))),
        third(register_module("third", Unit<Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return third(first(second(first(x)))); }
  Unit<Block> first;
  Unit<Block> second;
  Unit<Block> third;
};

TEST(UnitCalls, TwiceInOneStepTrainLikeAPlainModel) {
  expect_trains_like_plain(maker<CalledTwiceImpl>(), kSquare);
}

TEST(UnitCalls, TwiceInOneStepTakeARepeatedBackward) {
  const auto make = maker<CalledTwiceImpl>();
  const auto expected = testing::train_plain(build(make), 2, 3, kTwiceTheSquare);
  for (const Strategy& strategy : {Strategy::optim, Strategy::optim_grads_params}) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh();
      auto model = build(make);
      Sharded sharded = fully_shard(model, mesh, {.strategy = strategy});
      train_with_two_backwards(model, sharded, world.rank());
      testing::expect_close(testing::weights_of(sharded, model), expected, to_text(strategy));
    });
  }
}

struct NeverCalledImpl : torch::nn::Module {
  NeverCalledImpl()
      : first(register_module("first", Unit<Block>(5, 5))),
        never(register_module("never", Unit<Block>(40, 40))),
        third(register_module("third", Unit<Block>(5, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return third(first(x)); }
  Unit<Block> first;
  Unit<Block> never;
  Unit<Block> third;
};

TEST(UnitCalls, ThatNeverHappenDoNoHarm) {
  expect_trains_like_plain(maker<NeverCalledImpl>(), kSquare);
}

TEST(UnitCalls, WhoseResultIsNotUsedDoNoHarm) {
  struct SideImpl : torch::nn::Module {
    SideImpl()
        : first(register_module("first", Unit<Block>(5, 5))),
          side(register_module("side", Unit<Block>(5, 5))),
          third(register_module("third", Unit<Block>(5, 3))) {}
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor y = first(x);
      kept = side(y);
      return third(y);
    }
    Unit<Block> first;
    Unit<Block> side;
    Unit<Block> third;
    at::Tensor kept;
  };
  expect_trains_like_plain(maker<SideImpl>(), kSquare);
}

}  // namespace
}  // namespace fsdp::unit_calls_test
