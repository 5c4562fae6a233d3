// Whole steps as a CUDA graph: the same bits as without one.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "support/require.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::graph_device_test {
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
  std::unique_ptr<Optimizer> optimizer;
  int microbatches = 1;
  at::Tensor tokens;  // [microbatches, rows, sequence + 1], where batches are copied to
  at::Tensor loss;

  Training(const Mesh& mesh, const ShardOptions& options, at::ScalarType dtype, int parts,
           const AdamWOptions& update = {.lr = 1e-2, .step = {.max_norm = 0.5}})
      : model(build_language_model(small_llama(), {.seed = 3, .dtype = dtype})),
        sharded(shard(mesh, options)),
        optimizer(make_optimizer(sharded, options, update)),
        microbatches(parts),
        tokens(at::stack(std::vector<at::Tensor>(static_cast<size_t>(parts), small_tokens(0, 0)))
                   .cuda()) {}

  static std::unique_ptr<Optimizer> make_optimizer(const Sharded& sharded,
                                                   const ShardOptions& options,
                                                   const AdamWOptions& update) {
    if (!options.matrices.declared) return std::make_unique<AdamW>(sharded, update);
    return std::make_unique<Muon>(sharded, MuonOptions{.lr = update.lr, .step = update.step});
  }

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

// Options that change the parts of a step, each beside its eager twin.
struct OptionsCase {
  const char* name;
  ShardOptions options;
  AdamWOptions update = {.lr = 1e-2, .step = {.max_norm = 0.5}};
};

std::vector<OptionsCase> options_cases() {
  const PrecisionPolicy narrow_wire{.main_grads = at::kFloat, .grad_comm = at::kBFloat16};
  const auto moments = [](at::ScalarType first, at::ScalarType second) {
    return AdamWOptions{.lr = 1e-2, .first_moment = first, .second_moment = second};
  };
  return {{"bf16_on_the_wire", {.precision = narrow_wire}},
          {"bf16_on_the_wire_zero1", {.strategy = Strategy::optim, .precision = narrow_wire}},
          {"fp32_on_the_wire", {.precision = {.grad_comm = at::kFloat}}},
          {"separate_main_weights", {.precision = {.main_storage = MainStorage::kSeparate}}},
          {"bf16_moments", {}, moments(at::kBFloat16, at::kBFloat16)},
          {"fp16_moments", {}, moments(at::kHalf, at::kHalf)},
          {"fp8_moments", {}, moments(at::kFloat8_e4m3fn, at::kFloat8_e4m3fn)},
          {"muon", {.matrices = {.declared = true}}},
          {"planned", {.pool = PoolKind::kPlanned, .prefetch = 2}},
          {"double_buffer", {.pool = PoolKind::kDoubleBuffer}},
          {"double_buffer_step",
           {.pool = PoolKind::kDoubleBuffer, .gradient_lifetime = GradientLifetime::kStep}}};
}

class ReplaysWith : public ::testing::TestWithParam<OptionsCase> {};

TEST_P(ReplaysWith, AreBitwiseTheEagerSteps) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    ShardOptions options = GetParam().options;
    options.collectives = Collectives::kAlways;
    Training eager(mesh, options, at::kBFloat16, 2, GetParam().update);
    Training replayed(mesh, options, at::kBFloat16, 2, GetParam().update);
    Graph graph(replayed.sharded, replayed.optimizer.get(), [&] { replayed.step(); });
    for (int number = 0; number < 12; ++number) {
      eager.prepare(number);
      eager.step();
      replayed.prepare(number);
      graph.run();
      ASSERT_EQ(replayed.loss.item<double>(), eager.loss.item<double>()) << "step " << number;
    }
    EXPECT_TRUE(graph.is_recorded());
    expect_same(replayed.weights(), eager.weights());
  });
}

INSTANTIATE_TEST_SUITE_P(Options, ReplaysWith, ::testing::ValuesIn(options_cases()),
                         [](const auto& test) { return test.param.name; });

// Two units whose order is a field. Wide ones, so that their slabs are pieces of memory of their
// own.
struct TurnedImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 1024;

  TurnedImpl()
      : first(register_module("first", Unit<torch::nn::Linear>(kWidth, kWidth))),
        second(register_module("second", Unit<torch::nn::Linear>(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) {
    return is_turned ? first(at::tanh(second(x))) : second(at::tanh(first(x)));
  }

  Unit<torch::nn::Linear> first;
  Unit<torch::nn::Linear> second;
  bool is_turned = false;
};

struct TurnedTraining {
  std::shared_ptr<TurnedImpl> model;
  Sharded sharded;
  AdamW optimizer;
  at::Tensor input = at::linspace(-1, 1, 8 * TurnedImpl::kWidth, at::kCUDA).view({8, -1});

  explicit TurnedTraining(const Mesh& mesh)
      : model([] {
          torch::manual_seed(5);
          return std::make_shared<TurnedImpl>();
        }()),
        sharded([&] {
          model->to(at::kCUDA);
          return fully_shard(model, mesh, {.collectives = Collectives::kAlways});
        }()),
        optimizer(sharded, {.lr = 1e-3}) {}

  void step() {
    model->forward(input).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  double validate() {
    const at::NoGradGuard no_grad;
    return model->forward(input).sum().item<double>();
  }
  std::vector<at::Tensor> weights() {
    const auto whole = sharded.full_parameters();
    std::vector<at::Tensor> copies;
    for (const at::Tensor& parameter : model->parameters()) copies.push_back(parameter.cpu());
    return copies;
  }
};

// Two eager steps in another order plan the pool anew, and the next pass frees the memory that the
// recorded step uses; here it is given to others at once, who would see replays write to it.
TEST(GraphOnDevice, IsRecordedAgainWhenItsMemoryWasPlannedAnew) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    TurnedTraining eager(mesh);
    TurnedTraining replayed(mesh);
    Graph graph(replayed.sharded, &replayed.optimizer, [&] { replayed.step(); });
    const auto run_both = [&](int steps) {
      for (int i = 0; i < steps; ++i) {
        eager.step();
        graph.run();
      }
    };
    run_both(6);
    ASSERT_TRUE(graph.is_recorded());
    for (TurnedTraining* training : {&eager, &replayed}) {
      training->model->is_turned = true;
      training->step();
      training->step();
      training->validate();
      training->model->is_turned = false;
    }
    std::vector<at::Tensor> others;
    for (int i = 0; i < 16; ++i)
      others.push_back(at::ones({TurnedImpl::kWidth * (TurnedImpl::kWidth + 1)}, at::kCUDA));
    run_both(1);
    EXPECT_FALSE(graph.is_recorded()) << "its memory is gone";
    run_both(5);
    EXPECT_TRUE(graph.is_recorded());
    for (const at::Tensor& other : others) EXPECT_TRUE((other == 1).all().item<bool>());
    EXPECT_EQ(replayed.validate(), eager.validate());
    expect_same(replayed.weights(), eager.weights());
  });
}

TEST(GraphOnDevice, FollowsATypeOnTheWireThatChangesBetweenRuns) {
  FSDP_REQUIRE_GPU();
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    const ShardOptions options{.precision = {.main_grads = at::kFloat},
                               .collectives = Collectives::kAlways};
    Training eager(mesh, options, at::kBFloat16, 1);
    Training replayed(mesh, options, at::kBFloat16, 1);
    Training unchanged(mesh, options, at::kBFloat16, 1);
    Graph graph(replayed.sharded, replayed.optimizer.get(), [&] { replayed.step(); });
    for (int number = 0; number < 16; ++number) {
      for (Training* training : {&eager, &replayed, &unchanged}) {
        // fp16 rounds what fp32 carried whole.
        if (number == 6 && training != &unchanged)
          training->sharded.set_precision({.main_grads = at::kFloat, .grad_comm = at::kHalf});
        training->prepare(number);
        training == &replayed ? graph.run() : training->step();
      }
    }
    EXPECT_TRUE(graph.is_recorded());
    expect_same(replayed.weights(), eager.weights());
    EXPECT_FALSE(at::equal(replayed.weights()[0], unchanged.weights()[0])) << "nothing changed";
  });
}

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
    AdamWOptions update{.lr = 1e-2, .step = {.loss_scale = LossScale::dynamic(1e30)}};
    update.step.loss_scale.interval = 4;
    const ShardOptions options{.precision = {.main_grads = at::kBFloat16}};
    Training eager(mesh, options, at::kBFloat16, 1, update);
    Training replayed(mesh, options, at::kBFloat16, 1, update);
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

}  // namespace
}  // namespace fsdp::graph_device_test
