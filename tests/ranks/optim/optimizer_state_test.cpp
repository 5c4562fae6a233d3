// The state of an optimizer: its names, bytes and addresses, and when it is touched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>

#include "fsdp/base/text.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/optim/task_queue.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/engine/engine_views.h"
#include "support/optimizer_training.h"

namespace fsdp::optimizer_state_test {
namespace {

using ::testing::AllOf;
using testing::build;
using testing::Chain;
using testing::error_of;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::input_for;
using testing::loss_of;
using testing::on_sharded_chain;
using testing::run_ranks;

void take_steps(Chain& model, AdamW& optimizer, int rank, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    loss_of(model, rank, step).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

// --- names ---------------------------------------------------------------------------------------

// More ranks than some tensors have elements: every rank names everything, and together the ranks
// have every element once.
TEST(OptimizerShards, NameEveryParameterOnEveryRank) {
  for (const double fraction : {0.0, 0.4, 1.0}) {
    std::map<std::string, int64_t> elements;
    std::mutex mutex;
    on_sharded_chain(4, {.offload = {.fraction = fraction}},
                     [&](Chain& model, Sharded& sharded, int rank) {
                       AdamW optimizer(sharded);
                       take_steps(model, optimizer, rank, 0, 1);
                       std::vector<std::string> names;
                       for (const OptimizerShard& shard : optimizer.shards()) {
                         names.push_back(shard.parameter + " " + shard.name);
                         const std::lock_guard lock(mutex);
                         elements[names.back()] += shard.values.numel();
                       }
                       std::vector<std::string> expected;
                       for (const auto& unit : {"unit0", "unit1", "unit2"})
                         for (const char* moment : {"exp_avg", "exp_avg_sq"})
                           for (const char* parameter : {"weight", "bias"})
                             expected.push_back(concat(unit, ".linear.", parameter, " ", moment));
                       EXPECT_EQ(names, expected);
                     });
    EXPECT_EQ(elements.at("unit0.linear.weight exp_avg"), 35);
    EXPECT_EQ(elements.at("unit2.linear.bias exp_avg_sq"), 3);
  }
}

// Does what a checkpoint would do, for every type of moments and every place of them.
TEST(OptimizerShards, BringTrainingBackBitByBit) {
  for (const auto& [moments, fraction] : {std::pair{at::kFloat, 0.5},
                                          {at::kBFloat16, 0.0},
                                          {at::kHalf, 0.5},
                                          {at::kFloat8_e4m3fn, 0.0},
                                          {at::kFloat8_e5m2, 0.5}})
    run_ranks(2, [&, moments = moments, fraction = fraction](World& world) {
      const Mesh mesh = world.mesh();
      const AdamWOptions options{.lr = 0.01,
                                 .first_moment = moments,
                                 .second_moment = moments,
                                 .step = {.loss_scale = LossScale::fixed(4.0)}};
      const ShardOptions shard{.offload = {.fraction = fraction}};
      Chain model = build([] { return Chain(3); });
      const Sharded sharded = fully_shard(model, mesh, shard);
      AdamW optimizer(sharded, options);
      take_steps(model, optimizer, world.rank(), 0, 3);
      const std::vector<at::Tensor> weights = testing::weights_of(sharded, model);
      const std::vector<OptimizerShard> saved = optimizer.shards();
      const StepState state = optimizer.state();
      take_steps(model, optimizer, world.rank(), 3, 6);

      Chain again = build([] { return Chain(3); }, 99);
      const Sharded resumed = fully_shard(again, mesh, shard);
      {
        const auto whole = resumed.full_parameters(Sharded::Access::kWrite);
        const at::NoGradGuard no_grad;
        const std::vector<at::Tensor> parameters = again->parameters();
        for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(weights[i]);
      }
      AdamW restored(resumed, options);
      restored.set_shards(saved);
      restored.set_state(state);
      take_steps(again, restored, world.rank(), 3, 6);
      expect_equal(testing::weights_of(resumed, again), testing::weights_of(sharded, model),
                   c10::toString(moments));
    });
}

// Powers of the betas end at fixed numbers; a loop over all steps would take hours.
TEST(OptimizerState, OfAnyNumberOfStepsIsSetAtOnce) {
  on_sharded_chain(1, {}, [](Chain& model, Sharded& sharded, int rank) {
    const AdamWOptions options{.lr = 0.01};
    AdamW optimizer(sharded, options);
    optimizer.set_state({.step = 100});
    double power = 1.0;
    for (int i = 0; i < 100; ++i) power *= options.beta2;
    EXPECT_EQ(optimizer.state().beta2_power, power);
    optimizer.set_state({.step = 1'000'000'000'000});
    EXPECT_EQ(optimizer.state().step, 1'000'000'000'000);
    EXPECT_EQ(optimizer.state().beta2_power, optimizer.state().beta2_power * options.beta2);
    take_steps(model, optimizer, rank, 0, 1);
    EXPECT_EQ(optimizer.state().step, 1'000'000'000'001);
  });
}

TEST(OptimizerShards, OfAnotherWorldAreRefusedBeforeAnythingChanges) {
  on_sharded_chain(2, {}, [](Chain& model, Sharded& sharded, int rank) {
    AdamW optimizer(sharded);
    take_steps(model, optimizer, rank, 0, 1);
    std::vector<OptimizerShard> shards = optimizer.shards();
    const at::Tensor before = shards.front().values.clone();
    for (OptimizerShard& shard : shards) shard.values = shard.values + 1.0;
    shards.back().values = at::zeros({shards.back().values.numel() + 1});
    EXPECT_THAT(error_of([&] { optimizer.set_shards(shards); }),
                AllOf(HasSubstr("'unit2.linear.bias'"), HasSubstr("another number of ranks")));
    EXPECT_TRUE(at::equal(optimizer.shards().front().values, before));
    shards.resize(1);
    shards.front().parameter = "unit0.linear.wait";
    EXPECT_THAT(error_of([&] { optimizer.set_shards(shards); }),
                AllOf(HasSubstr("'unit0.linear.wait'"), HasSubstr("'unit0.linear.weight'")));
  });
}

// --- bytes ---------------------------------------------------------------------------------------

TEST(Optimizer, GivesEverythingBack) {
  on_sharded_chain(2, {.offload = {.fraction = 0.5}}, [](Chain& model, Sharded& sharded, int rank) {
    const int64_t before = sharded.memory().total_bytes() + sharded.memory().host_bytes;
    {
      AdamW optimizer(sharded);
      take_steps(model, optimizer, rank, 0, 2);
      loss_of(model, rank, 2).backward();
      optimizer.step();  // and goes while it is hidden
    }
    EXPECT_EQ(sharded.memory().moment_bytes, 0);
    EXPECT_EQ(sharded.memory().total_bytes() + sharded.memory().host_bytes, before);
    loss_of(model, rank, 3).backward();  // the model goes on without it
  });
}

// --- addresses -----------------------------------------------------------------------------------

// A replayed step needs this: gradients are views of one buffer, before and after zero_grad(), in
// their own type.
TEST(Gradients, StayWhereTheyAre) {
  const ShardOptions options{.precision = {.params = at::kBFloat16}};
  on_sharded_chain(2, options, [](Chain& model, Sharded& sharded, int rank) {
    AdamW optimizer(sharded);
    const auto addresses = [&] {
      std::vector<const void*> all;
      for (const ShardedParameter& parameter : sharded.parameters()) {
        EXPECT_EQ(parameter.gradient.scalar_type(), at::kBFloat16);
        all.push_back(parameter.gradient.const_data_ptr());
      }
      return all;
    };
    const std::vector<const void*> first = addresses();
    const int64_t bytes = sharded.memory().total_bytes();
    for (int step = 0; step < 3; ++step) {
      model(input_for(rank, step).to(at::kBFloat16)).sum().backward();
      EXPECT_EQ(addresses(), first);
      optimizer.step();
      EXPECT_EQ(addresses(), first);
      optimizer.zero_grad();
      EXPECT_EQ(addresses(), first);
      EXPECT_EQ(sharded.memory().total_bytes(), bytes) << "no copy of a gradient anywhere";
    }
  });
}

// Weights that are whole between steps are not whole while an update writes them.
TEST(HiddenUpdates, MakeATouchedWeightAnErrorUntilTheyAreWaitedFor) {
  on_sharded_chain(1, {.strategy = Strategy::no_shard}, [](Chain& model, Sharded& sharded, int) {
    AdamW optimizer(sharded);
    const auto words_of_touching = [weight = model->parameters().front()] {
      return error_of([&] { weight.sum(); });
    };
    EXPECT_EQ(words_of_touching(), "");
    loss_of(model, 0, 0).backward();
    optimizer.step();
    EXPECT_THAT(words_of_touching(), HasSubstr("'unit0.linear.weight'"));
    {
      const auto whole = sharded.full_parameters();
      EXPECT_EQ(words_of_touching(), "");
    }
    optimizer.zero_grad();
    loss_of(model, 0, 1).backward();
    EXPECT_EQ(words_of_touching(), "");
  });
}

TEST(HiddenUpdates, AreWaitedForByForwardsWithoutGradients) {
  const auto outputs = [](Updates updates) {
    std::vector<at::Tensor> all;
    on_sharded_chain(2, {}, [&](Chain& model, Sharded& sharded, int rank) {
      AdamW optimizer(sharded, {.lr = 0.1, .step = {.updates = updates}});
      for (int step = 0; step < 3; ++step) {
        take_steps(model, optimizer, rank, step, step + 1);
        const at::NoGradGuard no_grad;
        const at::Tensor output = model(input_for(0, 7));
        if (rank == 0) all.push_back(output);
      }
    });
    return all;
  };
  expect_equal(outputs(Updates::kHidden), outputs(Updates::kBlocking));
}

TEST(HiddenUpdates, SurviveAFailedForward) {
  std::vector<at::Tensor> expected;
  for (const bool fails : {false, true})
    on_sharded_chain(2, {}, [&](Chain& model, Sharded& sharded, int rank) {
      AdamW optimizer(sharded, {.lr = 0.1});
      take_steps(model, optimizer, rank, 0, 2);
      if (fails) {
        model->units[1]->inside = [](auto&) { throw Error("out of luck"); };
        EXPECT_THAT(error_of([&] { loss_of(model, rank, 2); }), HasSubstr("out of luck"));
        model->units[1]->inside = nullptr;
        sharded.reset();
      }
      take_steps(model, optimizer, rank, 2, 4);
      const std::vector<at::Tensor> weights = testing::weights_of(sharded, model);
      if (rank != 0) return;
      if (!fails) expected = weights;
      expect_equal(weights, expected);
    });
}

// zero_grad() returns while updates still read gradients that live for a step; their memory is
// released when the updates have read them.
TEST(HiddenUpdates, LetGradientsGoWhenTheyAreRead) {
  on_sharded_chain(2, {.gradient_lifetime = GradientLifetime::kStep},
                   [](Chain& model, Sharded& sharded, int rank) {
                     AdamW optimizer(sharded);
                     for (int step = 0; step < 3; ++step) {
                       loss_of(model, rank, step).backward();
                       sharded.wait_gradients();
                       EXPECT_GT(sharded.memory().main_grad_bytes, 0);
                       optimizer.step();
                       optimizer.zero_grad();
                       optimizer.wait();
                       EXPECT_EQ(sharded.memory().main_grad_bytes, 0);
                     }
                   });
}

// --- task queues ---------------------------------------------------------------------------------

TEST(TaskQueue, RunsTasksInOrderAfterWhatTheyWaitFor) {
  TaskQueue first(c10::kCPU);
  TaskQueue second(c10::kCPU);
  std::atomic<bool> may_end = false;
  std::atomic<bool> has_ended = false;
  bool next_came_after = false;
  bool other_came_after = false;
  const Work slow = first.run([&] {
    may_end.wait(false);
    has_ended = true;
  });
  const Work next = first.run([&] { next_came_after = has_ended; });
  const Work other = second.run([&] { other_came_after = has_ended; }, std::span(&slow, 1));
  EXPECT_FALSE(next.done() || other.done());
  may_end = true;
  may_end.notify_all();
  next.wait();
  other.wait();
  EXPECT_TRUE(next_came_after);
  EXPECT_TRUE(other_came_after);
}

TEST(TaskQueue, HandsErrorsToThoseWhoWait) {
  TaskQueue queue(c10::kCPU);
  const Work failed = queue.run([] { throw Error("broken"); });
  const Work later = queue.run([] {});
  EXPECT_THAT(error_of([&] { failed.wait(); }), HasSubstr("broken"));
  EXPECT_THAT(error_of([&] { later.wait(); }), HasSubstr("broken"));
}

// step() returns while updates wait, and a unit's gather waits only for its own update.
TEST(HiddenUpdates, HoldNobodyUpButTheirOwnUnit) {
  on_sharded_chain(1, {}, [](Chain& model, Sharded& sharded, int) {
    Engine& engine = EngineAccess::of(sharded);
    TaskQueue queue(c10::kCPU);
    std::atomic<bool> second_may_end = false;
    UpdateView(sharded).begin(*engine.units()[0], queue.run([] {}));
    UpdateView(sharded).begin(*engine.units()[1], queue.run([&] { second_may_end.wait(false); }));
    bool first_ran = false;
    model->units[0]->inside = [&](auto&) {
      first_ran = true;
      second_may_end = true;  // before this, unit 1's update cannot end
      second_may_end.notify_all();
    };
    loss_of(model, 0, 0).backward();
    EXPECT_TRUE(first_ran);
  });
}

}  // namespace
}  // namespace fsdp::optimizer_state_test
