// Optimizers on sharded models: the numbers, however they are stored, sharded, hidden or offloaded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdlib>
#include <map>

#include "fsdp/optim/adamw.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/engine.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"

namespace fsdp {
namespace {

using ::testing::AllOf;
using testing::build;
using testing::Chain;
using testing::error_of;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::input_for;
using testing::run_ranks;

constexpr int kUnits = 4;
constexpr int kSteps = 4;

// Where the models are: FSDP_TEST_DEVICE, or the CPU.
c10::Device device() {
  const char* name = std::getenv("FSDP_TEST_DEVICE");
  return name == nullptr ? c10::Device(c10::kCPU) : c10::Device(name);
}

Chain make_chain(at::ScalarType dtype = at::kFloat) {
  Chain model = build([] { return Chain(kUnits); });
  model->to(device(), dtype);
  return model;
}

at::Tensor loss_of(Chain& model, int rank, int step) {
  const at::ScalarType dtype = model->parameters().front().scalar_type();
  return model(input_for(rank, step).to(device(), dtype)).to(at::kFloat).square().sum();
}

struct Training {
  int ranks = 1;
  int outer = 1;
  at::ScalarType compute = at::kFloat;
  ShardOptions shard = {};
  AdamWOptions adamw = {.lr = 0.01};
  int microbatches = 1;
};

struct Outcome {
  std::vector<at::Tensor> weights;                 // whole
  std::map<std::string, at::Tensor> main_weights;  // whole, by name
  std::vector<double> norms;                       // by step, if they were measured
};

// Main weights of all ranks, put together by the offsets every rank says it has.
class MainWeightCollector {
 public:
  void add(const Sharded& sharded) {
    const std::lock_guard lock(mutex_);
    for (const ShardedParameter& parameter : sharded.parameters()) {
      at::Tensor& whole = whole_[parameter.name];
      if (!whole.defined()) {
        int64_t numel = 1;
        for (const int64_t size : parameter.shape) numel *= size;
        whole = at::full({numel}, NAN, parameter.main_weight.options());
      }
      whole.narrow(0, parameter.begin, parameter.main_weight.numel()).copy_(parameter.main_weight);
    }
  }
  std::map<std::string, at::Tensor> take() { return std::move(whole_); }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> whole_;
};

Outcome train(const Training& run) {
  Outcome outcome;
  MainWeightCollector collector;
  run_ranks(run.ranks, [&](World& world) {
    const Mesh mesh = world.mesh({.outer = run.outer});
    Chain model = make_chain(run.compute);
    const Sharded sharded = fully_shard(model, mesh, run.shard);
    AdamW optimizer(sharded, run.adamw);
    std::vector<double> norms;
    for (int step = 0; step < kSteps; ++step) {
      for (int i = 0; i < run.microbatches; ++i) {
        sharded.microbatch({.last = i + 1 == run.microbatches});
        loss_of(model, world.rank(), step * run.microbatches + i).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
      if (run.adamw.step.measures_norm) norms.push_back(optimizer.gradient_norm());
    }
    collector.add(sharded);
    const std::vector<at::Tensor> weights = testing::weights_of(sharded, model);
    if (world.rank() == 0) outcome.weights = weights;
    if (world.rank() == 0) outcome.norms = norms;
  });
  outcome.main_weights = collector.take();
  return outcome;
}

void expect_same_bits(const Outcome& actual, const Outcome& expected, const std::string& what) {
  expect_equal(actual.weights, expected.weights, what);
  ASSERT_EQ(actual.main_weights.size(), expected.main_weights.size());
  for (const auto& [name, value] : expected.main_weights)
    EXPECT_TRUE(at::equal(actual.main_weights.at(name), value)) << what << " " << name;
  EXPECT_EQ(actual.norms, expected.norms) << what;
}

// The same training with libtorch alone; gradients are the mean over ranks.
struct Plain {
  std::vector<at::Tensor> weights;
  std::vector<double> norms;
};

Plain train_plain(const Training& run) {
  Chain model = make_chain();
  const auto options =
      torch::optim::AdamWOptions(run.adamw.lr).weight_decay(run.adamw.weight_decay);
  torch::optim::AdamW optimizer(model->parameters(), options);
  Plain plain;
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < run.microbatches; ++i)
      for (int rank = 0; rank < run.ranks; ++rank)
        (loss_of(model, rank, step * run.microbatches + i) / run.ranks).backward();
    double squared = 0;
    for (const at::Tensor& parameter : model->parameters())
      squared += parameter.grad().to(at::kDouble).square().sum().item<double>();
    plain.norms.push_back(std::sqrt(squared));
    if (run.adamw.step.max_norm > 0)
      torch::nn::utils::clip_grad_norm_(model->parameters(), run.adamw.step.max_norm);
    optimizer.step();
    optimizer.zero_grad();
  }
  plain.weights = model->parameters();
  return plain;
}

const std::vector<std::string> kStrategies = {"no_shard", "optim", "optim_grads",
                                              "optim_grads_params", "optim_grads_params+hfsdp"};

// Meshes on which a strategy makes sense.
std::vector<std::pair<int, int>> meshes_for(const std::string& strategy) {
  if (strategy.find("hfsdp") != std::string::npos) return {{4, 2}, {3, 3}};
  return {{1, 1}, {2, 1}, {3, 1}, {4, 2}};
}

// --- against libtorch ----------------------------------------------------------------------------

struct Ulps {
  double of_large = 0;  // weights that are eight times their update or more
  double of_all = 0;
};

// One step from the same state, with the same gradient; returns the largest errors. Not always 0:
// libtorch's vector kernels contract m * beta + g * (1 - beta) into one rounding where the
// processor can, and divide twice per element where we divide once. So an ulp is that of the
// largest number that takes part: a weight that was as large as its update has lost its leading
// bits, and so has a moment that was as large as its gradient.
Ulps ulps_from_libtorch(double rate) {
  Ulps worst;
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW ours(sharded, {.lr = rate, .decay_spares_vectors = false});
    std::vector<at::Tensor> theirs;
    for (const ShardedParameter& parameter : sharded.parameters())
      theirs.push_back(parameter.main_weight.clone());
    torch::optim::AdamW libtorch(theirs, torch::optim::AdamWOptions(rate).weight_decay(0.01));
    const auto moments_of = [&](size_t i) -> torch::optim::AdamWParamState& {
      return static_cast<torch::optim::AdamWParamState&>(
          *libtorch.state().at(theirs[i].unsafeGetTensorImpl()));
    };
    for (int step = 1; step <= 20; ++step) {
      loss_of(model, 0, step).backward();
      std::vector<ShardedParameter> now = sharded.parameters();
      std::vector<at::Tensor> before;
      std::vector<at::Tensor> terms;  // of the first moment
      for (size_t i = 0; i < now.size(); ++i) {
        theirs[i].mutable_grad() = now[i].gradient.clone();
        before.push_back(theirs[i].clone());
        terms.push_back(now[i].gradient.abs() * 0.1);
        if (step > 1) terms[i] += moments_of(i).exp_avg().abs() * 0.9;
      }
      libtorch.step();
      ours.step();
      ours.zero_grad();
      now = sharded.parameters();
      const std::vector<OptimizerShard> moments = ours.shards();
      for (size_t i = 0; i < now.size(); ++i) {
        auto& state = moments_of(i);
        const at::Tensor root = (state.exp_avg_sq() / (1 - std::pow(0.999, step))).sqrt() + 1e-8;
        const at::Tensor update = rate / (1 - std::pow(0.9, step)) * terms[i] / root;
        const at::Tensor size =
            at::maximum(at::maximum(before[i].abs(), now[i].main_weight.abs()), update);
        const at::Tensor ulp = at::nextafter(size, at::full_like(size, INFINITY)) - size;
        const at::Tensor error = (now[i].main_weight - theirs[i]).abs();
        const at::Tensor ulps = error / ulp;
        const at::Tensor is_large = before[i].abs() >= 8 * update;
        worst.of_all = std::max(worst.of_all, ulps.max().item<double>());
        worst.of_large = std::max(worst.of_large, (ulps * is_large).max().item<double>());
        // The next step begins from the same state again.
        theirs[i].copy_(now[i].main_weight);
        for (const OptimizerShard& shard : moments)
          if (shard.parameter == now[i].name)
            (shard.name == "exp_avg" ? state.exp_avg() : state.exp_avg_sq()).copy_(shard.values);
      }
    }
  });
  return worst;
}

TEST(AdamWOnOneRank, IsWithinOneUlpOfLibtorchPerStep) {
  for (const double rate : {1e-4, 1e-3, 1e-2}) {
    const Ulps ulps = ulps_from_libtorch(rate);
    EXPECT_LE(ulps.of_large, 1.0);
    // What the update itself was rounded by shows: seven times half an ulp, here and there.
    EXPECT_LE(ulps.of_all, 4.0);
  }
}

class Strategies : public ::testing::TestWithParam<std::string> {};

TEST_P(Strategies, TrainAsLibtorchWithClippingDoes) {
  for (const auto& [ranks, outer] : meshes_for(GetParam()))
    for (const int microbatches : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, outer " << outer << ", "
                                        << microbatches << " microbatches");
      Training run{.ranks = ranks, .outer = outer, .microbatches = microbatches};
      run.shard.strategy = parse_strategy(GetParam());
      run.adamw.decay_spares_vectors = false;
      run.adamw.step = {.max_norm = 0.5, .measures_norm = true};
      const Outcome actual = train(run);
      const Plain plain = train_plain(run);
      testing::expect_close(actual.weights, plain.weights);
      ASSERT_EQ(actual.norms.size(), plain.norms.size());
      for (size_t i = 0; i < plain.norms.size(); ++i) {
        EXPECT_GT(plain.norms[i], 0.5) << "or nothing is clipped";
        EXPECT_NEAR(actual.norms[i], plain.norms[i], 1e-5 * plain.norms[i]) << "step " << i;
      }
    }
}

// The optimizer sees elements, not parameters: where they are cut changes nothing. (Gradients are
// equal bit by bit because every rank computes the same loss here.)
TEST_P(Strategies, UpdateAShardAsTheShardOfTheUpdate) {
  const auto with_equal_data = [&](int ranks, int outer, const AdamWOptions& adamw) {
    MainWeightCollector collector;
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = outer});
      Chain model = make_chain(at::kBFloat16);
      ShardOptions options{.strategy = parse_strategy(GetParam())};
      options.precision.main_grads = at::kFloat;
      options.gradient = GradientOf::kSumOverRanks;
      const Sharded sharded = fully_shard(model, mesh, options);
      AdamW optimizer(sharded, adamw);
      for (int step = 0; step < kSteps; ++step) {
        // Halves of a power of two: a sum of equal parts is exact.
        (loss_of(model, 0, step) / ranks).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      collector.add(sharded);
    });
    return collector.take();
  };
  for (const AdamWOptions& adamw :
       {AdamWOptions{.lr = 0.01},
        AdamWOptions{.lr = 0.01, .first_moment = at::kBFloat16, .second_moment = at::kBFloat16}}) {
    const auto expected = with_equal_data(1, 1, adamw);
    for (const auto& [ranks, outer] : {std::pair(2, 1), std::pair(4, 2)}) {
      const bool shards_outer = GetParam().find("hfsdp") != std::string::npos;
      if (shards_outer && outer == 1) continue;
      const auto actual = with_equal_data(ranks, outer, adamw);
      for (const auto& [name, value] : expected)
        EXPECT_TRUE(at::equal(actual.at(name), value)) << name << " on " << ranks;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Named, Strategies, ::testing::ValuesIn(kStrategies), [](const auto& each) {
  std::string name = each.param;
  std::replace(name.begin(), name.end(), '+', '_');
  return name;
});

TEST(SGD, TrainsAsLibtorchDoes) {
  for (const bool nesterov : {false, true})
    for (const double momentum : {0.0, 0.9}) {
      if (nesterov && momentum == 0.0) continue;
      Chain plain = make_chain();
      torch::optim::SGD expected(
          plain->parameters(),
          torch::optim::SGDOptions(0.05).momentum(momentum).nesterov(nesterov).weight_decay(0.02));
      for (int step = 0; step < kSteps; ++step) {
        for (int rank = 0; rank < 3; ++rank) (loss_of(plain, rank, step) / 3).backward();
        expected.step();
        expected.zero_grad();
      }
      run_ranks(3, [&](World& world) {
        const Mesh mesh = world.mesh();
        Chain model = make_chain();
        const Sharded sharded = fully_shard(model, mesh);
        SGD optimizer(sharded, {.lr = 0.05,
                                .momentum = momentum,
                                .nesterov = nesterov,
                                .weight_decay = 0.02,
                                .decay_spares_vectors = false});
        for (int step = 0; step < kSteps; ++step) {
          loss_of(model, world.rank(), step).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
        testing::expect_close(testing::weights_of(sharded, model), plain->parameters());
      });
    }
}

// --- the same numbers, however ------------------------------------------------------------------

Training bf16_run(int ranks) {
  Training run{.ranks = ranks, .compute = at::kBFloat16};
  run.shard.precision.main_grads = at::kFloat;
  run.adamw.step = {.max_norm = 1.0, .measures_norm = true};
  return run;
}

TEST(SplitMainWeights, TrainAsSeparateOnesDoBitByBit) {
  for (const std::string& strategy : kStrategies) {
    Training split = bf16_run(4);
    split.outer = 2;
    split.shard.strategy = parse_strategy(strategy);
    ASSERT_EQ(split.shard.precision.main_storage, MainStorage::kSplit) << "the default";
    Training separate = split;
    separate.shard.precision.main_storage = MainStorage::kSeparate;
    expect_same_bits(train(split), train(separate), strategy);
  }
}

TEST(SplitMainWeights, TakeTwoBytesBesideTheWeight) {
  run_ranks(3, [](World& world) {
    const Mesh mesh = world.mesh();
    for (const auto& [storage, bytes] :
         {std::pair(MainStorage::kSplit, 2), std::pair(MainStorage::kSeparate, 4)}) {
      Chain model = make_chain(at::kBFloat16);
      const Sharded sharded = fully_shard(model, mesh, {.precision = {.main_storage = storage}});
      const MemoryReport memory = sharded.memory();
      EXPECT_EQ(memory.main_weight_bytes, memory.weight_bytes / 2 * bytes);
    }
  });
}

TEST(SplitMainWeights, CannotBeChangedInPlaceByOthers) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain(at::kBFloat16);
    const Sharded sharded = fully_shard(model, mesh);
    EXPECT_THAT(error_of([&] { sharded.flat_shards(); }),
                AllOf(HasSubstr("'unit0'"), HasSubstr("MainStorage::kSeparate")));
  });
}

TEST(HiddenUpdates, GiveTheNumbersOfBlockingOnes) {
  for (const std::string& strategy : kStrategies)
    for (const auto lifetime : {GradientLifetime::kPersistent, GradientLifetime::kStep}) {
      Training hidden = bf16_run(4);
      hidden.outer = 2;
      hidden.shard.strategy = parse_strategy(strategy);
      hidden.shard.gradient_lifetime = lifetime;
      ASSERT_EQ(hidden.adamw.step.updates, Updates::kHidden) << "the default";
      Training blocking = hidden;
      blocking.adamw.step.updates = Updates::kBlocking;
      expect_same_bits(train(hidden), train(blocking), strategy);
    }
}

TEST(Offload, GivesTheNumbersOfNoOffload) {
  for (const char* strategy : {"no_shard", "optim", "optim_grads_params"})
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      Training run = bf16_run(3);
      run.compute = compute;
      run.shard.strategy = parse_strategy(strategy);
      const Outcome expected = train(run);
      for (const double fraction : {0.37, 1.0})
        for (const bool overlap : {true, false}) {
          // Chunks smaller than a shard, so that several are on their way at once.
          run.shard.offload = {.fraction = fraction, .overlap = overlap, .chunk_numel = 128};
          expect_same_bits(train(run), expected, std::string(strategy));
        }
    }
}

TEST(Offload, OfBf16WeightsWithoutMainWeightsIsExactToo) {
  Training run = bf16_run(2);
  run.shard.precision.main_params = std::nullopt;
  run.adamw.step.rounding = Rounding::kStochastic;
  const Outcome expected = train(run);
  run.shard.offload.fraction = 0.5;
  expect_same_bits(train(run), expected, "bf16");
}

// --- the norm
// --------------------------------------------------------------------------------------

TEST(GradientNorm, ComesOutOfTheReductionWhereThatStoresTheOptimizersPart) {
  run_ranks(4, [](World& world) {
    const Mesh mesh = world.mesh({.outer = 2});
    for (const auto& [strategy, comes_along] :
         {std::pair("no_shard", false), std::pair("optim", false),
          std::pair("optim_grads_params", false), std::pair("optim_grads_params+hfsdp", true)}) {
      Chain model = make_chain();
      const Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(strategy)});
      loss_of(model, world.rank(), 0).backward();
      sharded.wait_gradients();
      for (const auto& unit : sharded.engine().units())
        for (const GroupState& state : unit->groups)
          EXPECT_EQ(state.group->gradient().squares().defined(), comes_along) << strategy;
    }
  });
}

TEST(GradientNorm, SeesGradientsThatTheUserChanged) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.step = {.measures_norm = true}});
    const auto norm = [&](double factor) {
      loss_of(model, world.rank(), 0).backward();
      for (const FlatShard& shard : sharded.flat_shards())
        if (factor != 1.0) shard.gradient.mul_(factor);
      optimizer.set_learning_rate(0.0);
      optimizer.step();
      optimizer.zero_grad();
      return optimizer.gradient_norm();
    };
    const double once = norm(1.0);
    EXPECT_GT(once, 0.0);
    EXPECT_NEAR(norm(3.0), 3.0 * once, 1e-5 * once);
  });
}

// --- steps that are not like others --------------------------------------------------------------

TEST(Steps, WithANanAreSkippedByAllRanksIfAskedTo) {
  run_ranks(3, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.lr = 0.1, .step = {.on_nonfinite = OnNonfinite::kSkip}});
    const auto step = [&](double factor) {
      (loss_of(model, world.rank(), 0) * factor).backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    step(1.0);
    const std::vector<at::Tensor> before = testing::weights_of(sharded, model);
    step(world.rank() == 1 ? NAN : 1.0);
    EXPECT_TRUE(optimizer.was_skipped());
    expect_equal(testing::weights_of(sharded, model), before);
    step(1.0);
    EXPECT_FALSE(optimizer.was_skipped());
    EXPECT_EQ(optimizer.state().step, 2);
    EXPECT_EQ(optimizer.state().skipped, 1);
    EXPECT_FALSE(at::equal(testing::weights_of(sharded, model).front(), before.front()));
  });
}

TEST(LossScale, OfAPowerOfTwoChangesNoNumber) {
  Training run{.ranks = 2};
  const Outcome expected = train(run);
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.lr = 0.01, .step = {.loss_scale = LossScale::fixed(1024.0)}});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.scaled(loss_of(model, world.rank(), step)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    expect_equal(testing::weights_of(sharded, model), expected.weights);
  });
}

TEST(LossScale, StepsBackWhenFp16GradientsOverflow) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain(at::kHalf);
    const Sharded sharded = fully_shard(model, mesh);
    AdamW optimizer(sharded, {.lr = 0.01, .step = {.loss_scale = LossScale::dynamic(0x1p20)}});
    for (int step = 0; step < 12; ++step) {
      optimizer.scaled(loss_of(model, world.rank(), step)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const StepState state = optimizer.state();
    EXPECT_GT(state.skipped, 0) << "2^20 is too much for fp16";
    EXPECT_GT(state.step, 0);
    EXPECT_EQ(state.step + state.skipped, 12);
    EXPECT_EQ(state.loss_scale, std::ldexp(1.0, 20 - static_cast<int>(state.skipped)));
  });
}

TEST(Steps, WithoutGradientsAreRefused) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    for (const std::string& strategy : kStrategies) {
      if (strategy.find("hfsdp") != std::string::npos) continue;
      Chain model = make_chain();
      const Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(strategy)});
      AdamW optimizer(sharded);
      EXPECT_THAT(error_of([&] { optimizer.step(); }),
                  AllOf(HasSubstr("unit0"), HasSubstr("backward()")));
      loss_of(model, world.rank(), 0).backward();
      EXPECT_EQ(error_of([&] { optimizer.step(); }), "");
    }
  });
}

TEST(Options, ThatMakeNoSenseAreRefusedInWords) {
  run_ranks(1, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    const auto refusal = [&](const AdamWOptions& options) {
      return error_of([&] { AdamW optimizer(sharded, options); });
    };
    EXPECT_THAT(refusal({.lr = -1.0}), HasSubstr("lr is -1"));
    EXPECT_THAT(refusal({.beta2 = 1.0}), HasSubstr("beta2 is 1"));
    EXPECT_THAT(refusal({.first_moment = at::kInt}), HasSubstr("first_moment is Int"));
    EXPECT_THAT(refusal({.step = {.max_norm = -2.0}}), HasSubstr("step.max_norm is -2"));
    EXPECT_THAT(refusal({.rules = {{.pattern = "unit0.linar.weight"}}}),
                AllOf(HasSubstr("unit0.linar.weight"), HasSubstr("unit0.linear.weight")));
    EXPECT_THAT(error_of([&] { SGD optimizer(sharded, {.nesterov = true}); }),
                HasSubstr("momentum"));
    Chain other = make_chain();
    EXPECT_THAT(error_of([&] { fully_shard(other, mesh, {.offload = {.fraction = 1.5}}); }),
                HasSubstr("offload.fraction is 1.5"));
    Chain doubled = make_chain(at::kDouble);
    const Sharded wide = fully_shard(doubled, mesh);
    EXPECT_THAT(error_of([&] { AdamW optimizer(wide); }),
                AllOf(HasSubstr("unit0.linear.weight"), HasSubstr("fp64")));
    EXPECT_THAT(error_of([&] { AdamW(sharded).gradient_norm(); }), HasSubstr("measures_norm"));
  });
}

TEST(Rules, DecideWhatDecaysAndHowFast) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    const std::vector<at::Tensor> before = testing::weights_of(sharded, model);
    AdamW optimizer(sharded, {.lr = 0.1,
                              .weight_decay = 0.5,
                              .rules = {{.pattern = "unit1.*", .rate_scale = 0.0},
                                        {.pattern = "unit2.linear.bias", .weight_decay = 0.25}}});
    (loss_of(model, 0, 0) * 0.0).backward();  // gradients of 0: what moves is decay
    optimizer.step();
    const std::vector<at::Tensor> after = testing::weights_of(sharded, model);
    size_t i = 0;
    for (const auto& item : model->named_parameters()) {
      const std::string& name = item.key();
      double factor = name.find("weight") != std::string::npos ? 1 - 0.1 * 0.5 : 1.0;
      if (name.find("unit1.") == 0) factor = 1.0;
      if (name == "unit2.linear.bias") factor = 1 - 0.1 * 0.25;
      EXPECT_TRUE(at::allclose(after[i], before[i] * factor, 1e-6, 0)) << name;
      ++i;
    }
  });
}

}  // namespace
}  // namespace fsdp
