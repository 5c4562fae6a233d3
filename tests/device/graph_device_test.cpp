// Whole steps as a CUDA graph: bit by bit what the same steps compute without one.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "support/require.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp {
namespace {

using ::testing::HasSubstr;
using testing::run_ranks;
using testing::small_llama;
using testing::small_tokens;
using ::testing::ThrowsMessage;

constexpr int kSteps = 50;

// One rank's training of a small Llama, whose step can run as it is or as a graph.
struct Training {
  std::shared_ptr<LanguageModel> model;
  Sharded sharded;
  std::unique_ptr<AdamW> optimizer;
  int microbatches = 1;
  at::Tensor tokens;  // [microbatches, rows, sequence + 1], where batches are copied to
  at::Tensor loss;

  Training(const Mesh& mesh, ShardOptions options, at::ScalarType dtype, int parts,
           StepOptions step = {.max_norm = 0.5})
      : model(build_language_model(small_llama(), {.seed = 3, .dtype = dtype})),
        sharded(shard(mesh, options)),
        optimizer(std::make_unique<AdamW>(sharded, AdamWOptions{.lr = 1e-2, .step = step})),
        microbatches(parts),
        tokens(at::stack(std::vector<at::Tensor>(static_cast<size_t>(parts), small_tokens(0, 0)))
                   .cuda()) {}

  Sharded shard(const Mesh& mesh, const ShardOptions& options) {
    model->to(at::kCUDA);
    return fully_shard(model, mesh, options);
  }

  void forward_and_backward() {
    at::Tensor sum;
    for (int part = 0; part < microbatches; ++part) {
      sharded.microbatch({.last = part + 1 == microbatches});
      const at::Tensor mine = tokens[part];
      const at::Tensor total =
          model->loss(mine.narrow(1, 0, mine.size(1) - 1), mine.narrow(1, 1, mine.size(1) - 1))
              .total;
      optimizer->scaled(total / microbatches).backward();
      sum = sum.defined() ? sum + total.detach() : total.detach();
    }
    loss = sum;
  }

  void step() {
    forward_and_backward();
    optimizer->step();
    optimizer->zero_grad();
  }

  void prepare(int number) {
    optimizer->set_learning_rate(1e-2 / (1 + 0.1 * number));
    for (int part = 0; part < microbatches; ++part)
      tokens[part].copy_(small_tokens(part, number % 5));
  }

  std::vector<at::Tensor> weights() const {
    const auto whole = sharded.full_parameters();
    std::vector<at::Tensor> copies;
    for (const at::Tensor& parameter : model->parameters()) copies.push_back(parameter.cpu());
    return copies;
  }
};

void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << "parameter " << i;
}

using Case = std::tuple<std::string, Collectives, at::ScalarType, int>;
class Replays : public ::testing::TestWithParam<Case> {};

TEST_P(Replays, AreBitwiseTheEagerSteps) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [&](World& world) {
    const auto& [strategy, collectives, dtype, parts] = GetParam();
    const Mesh mesh = world.mesh();
    const ShardOptions options{.strategy = parse_strategy(strategy),
                               .precision = {.main_grads = at::kFloat},
                               .gradient_lifetime = GradientLifetime::kStep,
                               .collectives = collectives};
    Training eager(mesh, options, dtype, parts);
    Training replayed(mesh, options, dtype, parts);
    Graph graph(replayed.sharded, replayed.optimizer.get(), [&] { replayed.step(); });
    double first = 0;
    double last = 0;
    for (int number = 0; number < kSteps; ++number) {
      eager.prepare(number);
      eager.step();
      replayed.prepare(number);
      graph.run();
      last = eager.loss.item<double>();
      if (number == 0) first = last;
      ASSERT_EQ(replayed.loss.item<double>(), last) << "step " << number;
      ASSERT_EQ(replayed.optimizer->gradient_norm(), eager.optimizer->gradient_norm()) << number;
    }
    EXPECT_TRUE(graph.is_recorded());
    EXPECT_LT(last, 0.7 * first);  // it learns
    EXPECT_EQ(replayed.optimizer->state().step, kSteps);
    expect_same(replayed.weights(), eager.weights());
  });
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const auto& [strategy, collectives, dtype, parts] = info.param;
  return concat(strategy, collectives == Collectives::kAlways ? "_collectives_" : "_",
                c10::toString(dtype), "_", parts);
}

INSTANTIATE_TEST_SUITE_P(
    Strategies, Replays,
    ::testing::Combine(::testing::Values("no_shard", "optim", "optim_grads", "optim_grads_params"),
                       ::testing::Values(Collectives::kBetweenRanks, Collectives::kAlways),
                       ::testing::Values(at::kFloat, at::kBFloat16), ::testing::Values(1, 3)),
    name_of_case);

TEST(GraphOnDevice, LeavesRoomForValidationAndEagerStepsBetweenReplays) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const ShardOptions options{.collectives = Collectives::kAlways};
    Training eager(mesh, options, at::kFloat, 1);
    Training replayed(mesh, options, at::kFloat, 1);
    Graph graph(replayed.sharded, replayed.optimizer.get(), [&] { replayed.step(); });
    const auto validate = [](Training& training) {
      const at::NoGradGuard no_grad;
      const at::Tensor held = small_tokens(3, 9).cuda();
      return training.model->logits(held).sum().item<double>();
    };
    for (int number = 0; number < 20; ++number) {
      eager.prepare(number);
      replayed.prepare(number);
      eager.step();
      if (number % 7 == 6) {
        replayed.step();  // not replayed, now and then
      } else {
        graph.run();
      }
      if (number % 3 == 2) {
        EXPECT_EQ(validate(replayed), validate(eager)) << number;
      }
    }
    expect_same(replayed.weights(), eager.weights());
  });
}

TEST(GraphOnDevice, RecordsForwardAndBackwardAlone) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const ShardOptions options{.collectives = Collectives::kAlways};
    Training eager(mesh, options, at::kFloat, 2);
    Training replayed(mesh, options, at::kFloat, 2);
    Graph graph(replayed.sharded, nullptr, [&] { replayed.forward_and_backward(); });
    for (int number = 0; number < 12; ++number) {
      eager.prepare(number);
      eager.step();
      replayed.prepare(number);
      graph.run();
      replayed.optimizer->step();
      replayed.optimizer->zero_grad();
    }
    expect_same(replayed.weights(), eager.weights());
  });
}

TEST(GraphOnDevice, ContinuesRandomNumbersFromReplayToReplay) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Training training(mesh, {}, at::kFloat, 1);
    at::Tensor noise;
    Graph graph(training.sharded, training.optimizer.get(), [&] {
      training.step();
      noise = at::rand({64}, at::device(at::kCUDA));
    });
    std::vector<at::Tensor> drawn;
    for (int number = 0; number < 8; ++number) {
      training.prepare(number);
      graph.run();
      for (const at::Tensor& before : drawn) EXPECT_FALSE(at::equal(before, noise)) << number;
      drawn.push_back(noise.clone());
    }
  });
}

TEST(GraphOnDevice, SkipsAStepWhoseGradientsAreNotFiniteAndFollowsTheLossScale) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    StepOptions step{.loss_scale = LossScale::dynamic(1e30)};
    step.loss_scale.interval = 4;
    const ShardOptions options{.precision = {.main_grads = at::kBFloat16}};
    Training eager(mesh, options, at::kBFloat16, 1, step);
    Training replayed(mesh, options, at::kBFloat16, 1, step);
    Graph graph(replayed.sharded, replayed.optimizer.get(), [&] { replayed.step(); });
    for (int number = 0; number < 30; ++number) {
      eager.prepare(number);
      eager.step();
      replayed.prepare(number);
      graph.run();
      ASSERT_EQ(replayed.optimizer->state().loss_scale, eager.optimizer->state().loss_scale);
      ASSERT_EQ(replayed.optimizer->state().skipped, eager.optimizer->state().skipped);
    }
    expect_same(replayed.weights(), eager.weights());
  });
}

TEST(GraphOnDevice, SaysWhatCannotBeRecordedAndGoesOn) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Training training(mesh, {}, at::kFloat, 1);
    Training plain(mesh, {}, at::kFloat, 1);
    Graph graph(training.sharded, training.optimizer.get(), [&] {
      training.step();
      (void)training.loss.item<double>();
    });
    for (int number = 0; number < 3; ++number) {
      training.prepare(number);
      plain.prepare(number);
      graph.run();
      plain.step();
    }
    EXPECT_THAT([&] { graph.run(); }, ThrowsMessage<Error>(HasSubstr("waits for the device")));
    // The step that could not be recorded did not happen.
    training.step();
    plain.step();
    expect_same(training.weights(), plain.weights());

    Graph sets_rate(plain.sharded, plain.optimizer.get(), [&] {
      plain.optimizer->set_learning_rate(plain.optimizer->learning_rate() / 2);
      plain.step();
    });
    for (int number = 0; number < 3; ++number) sets_rate.run();
    EXPECT_THAT([&] { sets_rate.run(); }, ThrowsMessage<Error>(HasSubstr("outside of it")));
  });
}

TEST(GraphOnDevice, RefusesOptionsThatNeedTheHost) {
  FSDP_REQUIRE_GPU();
  const auto refusal = [](const ShardOptions& options, int ranks) {
    std::string words;
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh();
      Training training(mesh, options, at::kFloat, 1);
      try {
        Graph graph(training.sharded, training.optimizer.get(), [&] { training.step(); });
      } catch (const UsageError& error) {
        if (world.rank() == 0) words = error.what();
      }
    });
    return words;
  };
  EXPECT_THAT(refusal({.pool = PoolKind::kOnDemand, .collectives = Collectives::kAlways}, 1),
              HasSubstr("pool on_demand"));
  EXPECT_THAT(refusal({.offload = {.fraction = 0.5}}, 1), HasSubstr("offload.fraction 0.5"));
  EXPECT_THAT(refusal({.report_nan = ReportNan::kPerParameter}, 1), HasSubstr("report_nan"));
  EXPECT_THAT(refusal({}, 2), HasSubstr("threads of one process"));
  EXPECT_EQ(refusal({}, 1), "");
}

TEST(Graph, NeedsADeviceThatRecords) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const auto model = build_language_model(small_llama(), {.seed = 3});
    const Sharded sharded = fully_shard(model, mesh, {});
    EXPECT_THAT([&] { Graph(sharded, nullptr, [] {}); },
                ThrowsMessage<UsageError>(HasSubstr("a graph of steps on cpu was asked for")));
    EXPECT_THAT([] { GraphOptions{.warmup = 1}.validate(); },
                ThrowsMessage<UsageError>(HasSubstr("graph.warmup is 1")));
  });
}

}  // namespace
}  // namespace fsdp
