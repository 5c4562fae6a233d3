// Failures and their aftermath: exceptions, misuse, ends of life.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <stdexcept>

#include "fsdp/shard/engine/engine.h"
#include "support/run_ranks.h"
#include "support/trains_like_plain.h"
#include "support/watched_memory.h"

namespace fsdp::engine_failures_test {
namespace {

using ::testing::AllOf;
using testing::Block;
using testing::build;
using testing::Chain;
using testing::error_of;
using ::testing::HasSubstr;
using testing::input_for;
using testing::kSquare;
using testing::on_sharded_chain;
using testing::run_ranks;

const std::vector<Strategy> kStrategies = {Strategy::no_shard, Strategy::optim,
                                           Strategy::optim_grads, Strategy::optim_grads_params};

// --- exceptions ----------------------------------------------------------------------------------

class FailsInBackward final : public torch::autograd::Function<FailsInBackward> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("lost in the backward");
  }
};

// Runs `fail` before or between good steps; training must go on as if nothing had happened.
template <typename Fail>
void expect_recovers(const Fail& fail) {
  const auto expected = testing::train_plain(build([] { return Chain(5); }), 2, 4, kSquare);
  size_t turn = 0;
  for (const PoolKind kind : all_pool_kinds())
    for (const int good_steps : {0, 2}) {
      const Strategy& strategy = kStrategies[++turn % kStrategies.size()];
      testing::on_sharded(
          2, [] { return Chain(5); }, {.strategy = strategy, .pool = kind},
          [&](Chain& model, Sharded& sharded, int rank) {
            for (int step = 0; step < 4; ++step) {
              if (step == good_steps) {
                fail(model, rank);
                sharded.reset();
              }
              kSquare(model, rank, step).backward();
              testing::descend(sharded);
            }
            testing::expect_equal(testing::weights_of(sharded, model), expected,
                                  to_text(strategy) + " " + std::string(name_of(kind)));
          });
    }
}

TEST(Reset, AfterAnExceptionInForwardTrainingGoesOn) {
  expect_recovers([](Chain& model, int rank) {
    model->units[2]->inside = [](testing::BlockImpl&) { throw std::runtime_error("lost"); };
    EXPECT_EQ(error_of([&] { kSquare(model, rank, 9); }), "lost");
    model->units[2]->inside = nullptr;
  });
}

TEST(Reset, AfterAnExceptionInBackwardTrainingGoesOn) {
  expect_recovers([](Chain& model, int rank) {
    at::Tensor x = input_for(rank, 9);
    for (size_t i = 0; i < model->units.size(); ++i) {
      x = model->units[i](x);
      if (i == 2) x = FailsInBackward::apply(x);
    }
    EXPECT_THAT(error_of([&] { x.sum().backward(); }), HasSubstr("lost in the backward"));
    EXPECT_THAT(error_of([&] { kSquare(model, rank, 9); }),
                AllOf(HasSubstr("'unit0'"), HasSubstr("reset()")));
  });
}

TEST(Reset, DropsTheForwardOrTheGradientsOfTheCycle) {
  expect_recovers([](Chain& model, int rank) { kSquare(model, rank, 9).backward(); });
  expect_recovers([](Chain& model, int rank) { kSquare(model, rank, 9); });
}

TEST(Exceptions, InForwardLetTheUnitsGo) {
  on_sharded_chain(2, {.prefetch = 0}, [](Chain& model, Sharded& sharded, int rank) {
    model->units[1]->inside = [](testing::BlockImpl&) { throw std::runtime_error("lost"); };
    EXPECT_EQ(error_of([&] { kSquare(model, rank, 0); }), "lost");
    EXPECT_FALSE(EngineAccess::of(sharded).units()[1]->groups()[0].slabs().weight->is_held());
  });
}

// --- misuse --------------------------------------------------------------------------------------

TEST(DoubleBackward, IsRefusedInWords) {
  on_sharded_chain(2, {}, [](Chain& model, Sharded& sharded, int rank) {
    const at::Tensor loss = kSquare(model, rank, 0);
    EXPECT_THAT(error_of([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                AllOf(HasSubstr("create_graph"), HasSubstr("not sharded")));
    sharded.reset();
    kSquare(model, rank, 0).backward();
    testing::descend(sharded);
  });
}

TEST(Cycles, AccumulateOrSayThatTheyAreOver) {
  // Strategies that reduce at the end of the cycle cannot take another backward; the others can.
  for (const int ranks : {1, 2}) {
    for (const Strategy& strategy : kStrategies) {
      on_sharded_chain(
          ranks, {.strategy = strategy}, [&](Chain& model, Sharded& sharded, int rank) {
            const auto gradient = [&] { return sharded.flat_shards()[1].gradient.clone(); };
            kSquare(model, rank, 0).backward();
            const at::Tensor once = gradient();
            const bool waits = ranks > 1 && strategy.gradient.inner == Placement::kPartial;
            const std::string said = error_of([&] { kSquare(model, rank, 0).backward(); });
            if (waits) {
              EXPECT_THAT(said, AllOf(HasSubstr("zero_grad()"), HasSubstr("no_sync()")));
              EXPECT_TRUE(at::equal(gradient(), once)) << "what was reduced is still there";
              sharded.zero_grad();
              kSquare(model, rank, 0).backward();  // the message's advice is enough
              EXPECT_TRUE(at::equal(gradient(), once));
            } else {
              EXPECT_EQ(said, "") << to_text(strategy) << " on " << ranks;
              EXPECT_TRUE(at::allclose(gradient(), 2 * once));
            }
          });
    }
  }
}

// --- ends of life --------------------------------------------------------------------------------

enum class First : uint8_t { kModel, kHandle, kModelInsideAPass };

TEST(Lifetime, AllMemoryComesBackWhoeverGoesFirst) {
  for (const PoolKind kind : {PoolKind::kOnDemand, PoolKind::kPlanned}) {
    for (const First first : {First::kModel, First::kHandle, First::kModelInsideAPass}) {
      run_ranks(2, [&](World& world) {
        testing::OnceOnlyAllocator memory;
        const Mesh mesh = world.mesh();
        {
          Chain model = build([] { return Chain(4); });
          model->to(at::kBFloat16);
          auto sharded = std::make_unique<Sharded>(
              fully_shard(model, mesh,
                          {.precision = {.main_storage = MainStorage::kSeparate},
                           .pool = kind,
                           .allocator = &memory}));
          for (int step = 0; step < 2; ++step) {
            model(input_for(world.rank(), step).to(at::kBFloat16)).square().mean().backward();
            testing::descend(*sharded);
          }
          EXPECT_EQ(memory.live_bytes(), sharded->memory().total_bytes());
          EXPECT_GT(memory.live_bytes(), 0);
          at::Tensor open;
          if (first == First::kModelInsideAPass)
            open = model(input_for(world.rank(), 0).to(at::kBFloat16));
          if (first == First::kHandle) sharded.reset();
          model = nullptr;
          EXPECT_TRUE(first != First::kHandle || memory.live_bytes() == 0);
          sharded.reset();
          EXPECT_EQ(memory.live_bytes(), 0);
        }
        EXPECT_EQ(memory.live_bytes(), 0);
      });
    }
  }
}

TEST(Lifetime, OfAGraphAndAParameterThatOutliveTheModelEndsInAnErrorAtWorst) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    at::Tensor loss;
    at::Tensor parameter;
    {
      Chain model = build([] { return Chain(3); });
      Sharded sharded = fully_shard(model, mesh);
      kSquare(model, world.rank(), 0).backward();
      loss = kSquare(model, world.rank(), 0);
      parameter = model->units[1]->linear->weight;
    }
    EXPECT_EQ(parameter.sizes(), (at::IntArrayRef{7, 7}));
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("is sharded"));
#endif
  });
}

}  // namespace
}  // namespace fsdp::engine_failures_test
