// Optimizers on sharded models: the same numbers however they are stored, hidden or offloaded, and
// special steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/group/main_weights.h"
#include "support/optimizer_training.h"

namespace fsdp::optimizer_test {
namespace {

using ::testing::AllOf;
using testing::Chain;
using testing::error_of;
using testing::expect_equal;
using testing::expect_same_bits;
using ::testing::HasSubstr;
using testing::kSteps;
using testing::kStrategies;
using testing::loss_of;
using testing::make_chain;
using testing::Outcome;
using testing::run_ranks;
using testing::train;
using testing::Training;

// --- the same numbers, however -------------------------------------------------------------------

Training bf16_run(int ranks) {
  Training run{.ranks = ranks, .compute = at::kBFloat16};
  run.shard.precision.main_grads = at::kFloat;
  run.adamw.step = {.max_norm = 1.0, .measures_norm = true};
  return run;
}

// Split main weights and hidden updates are the defaults.
TEST(Training, GivesTheBitsOfSeparateMainWeightsAndOfBlockingUpdates) {
  for (const std::string& strategy : kStrategies) {
    Training usual = bf16_run(4);
    usual.outer = 2;
    usual.shard.strategy = parse_strategy(strategy);
    ASSERT_EQ(usual.shard.precision.main_storage, MainStorage::kSplit);
    ASSERT_EQ(usual.adamw.step.updates, Updates::kHidden);
    const Outcome expected = train(usual);
    Training separate = usual;
    separate.shard.precision.main_storage = MainStorage::kSeparate;
    expect_same_bits(train(separate), expected, strategy + " separate");
    Training blocking = usual;
    blocking.shard.gradient_lifetime = GradientLifetime::kStep;
    blocking.adamw.step.updates = Updates::kBlocking;
    expect_same_bits(train(blocking), expected, strategy + " blocking");
  }
}

// The tensors' version of the kernels' function, on bit patterns of every kind.
TEST(SplitMainWeights, AreExactBothWays) {
  const at::Tensor bits = at::cat({at::arange(-0x8000, 0x8000, at::kInt) * 65536 + 0x7FFF,
                                   at::arange(-0x8000, 0x8000, at::kInt) * 65536 - 0x8000,
                                   at::arange(0x3F7F0000, 0x3F810000, at::kInt),
                                   at::tensor({0x7F7FFFFF, 0x7F800000, 0, -0x7FFFFFFF - 1})});
  const at::Tensor values = bits.to(at::kInt).view(at::kFloat);
  const at::Tensor upper = at::empty_like(values, at::kBFloat16);
  const at::Tensor remainder = at::empty_like(values, at::kShort);
  split_into_halves(values, upper, remainder);
  const at::Tensor is_nan = values.isnan();
  EXPECT_TRUE(at::equal(upper.isnan(), is_nan));
  const at::Tensor same =
      join_halves(upper, remainder).view(at::kInt).eq(values.view(at::kInt)).logical_or(is_nan);
  EXPECT_TRUE(same.all().item<bool>());
  const auto* uppers = static_cast<const uint16_t*>(upper.const_data_ptr());
  for (int64_t i = 0; i < values.numel(); ++i) {
    const SplitWeight split = split_weight(values.const_data_ptr<float>()[i]);
    ASSERT_EQ(uppers[i], split.upper) << i;
    ASSERT_EQ(remainder.const_data_ptr<int16_t>()[i], split.remainder) << i;
  }
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

TEST(Offload, GivesTheNumbersOfNoOffload) {
  struct Types {
    at::ScalarType compute;
    std::optional<at::ScalarType> main_params;
  };
  for (const char* strategy : {"no_shard", "optim_grads_params"})
    for (const Types& types : {Types{at::kFloat, at::kFloat}, Types{at::kBFloat16, at::kFloat},
                               Types{at::kBFloat16, std::nullopt}}) {
      Training run = bf16_run(3);
      run.compute = types.compute;
      run.shard.strategy = parse_strategy(strategy);
      run.shard.precision.main_params = types.main_params;
      run.adamw.step.rounding = Rounding::kStochastic;
      const Outcome expected = train(run);
      for (const double fraction : {0.37, 1.0}) {
        // Chunks smaller than a shard, so that several are on their way at once.
        run.shard.offload = {.fraction = fraction, .overlap = fraction < 1, .chunk_numel = 128};
        expect_same_bits(train(run), expected, std::string(strategy));
      }
    }
}

// --- the norm ------------------------------------------------------------------------------------

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
      for (const auto& unit : EngineAccess::of(sharded).units())
        for (const ParamGroup& group : unit->groups())
          EXPECT_EQ(group.gradient().squares().defined(), comes_along) << strategy;
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
                  AllOf(HasSubstr("finds no gradients in this cycle"), HasSubstr("backward()")));
      loss_of(model, world.rank(), 0).backward();
      EXPECT_EQ(error_of([&] { optimizer.step(); }), "");
    }
  });
}

TEST(Steps, EndACycleOfWhichNoBackwardWasTheLast) {
  run_ranks(2, [](World& world) {
    for (const int outer : {1, 2}) {
      const Mesh mesh = world.mesh({.outer = outer});
      for (const std::string& strategy : kStrategies) {
        std::vector<at::Tensor> ends;
        for (const bool is_announced : {true, false}) {
          Chain model = make_chain();
          const Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(strategy)});
          SGD optimizer(sharded, {.lr = 0.1});
          for (int i = 0; i < 2; ++i) {
            sharded.microbatch({.last = is_announced && i == 1});
            loss_of(model, world.rank(), i).backward();
          }
          optimizer.step();
          const auto whole = sharded.full_parameters();
          ends.push_back(model->parameters().front().detach().clone());
        }
        EXPECT_TRUE(at::equal(ends[0], ends[1])) << strategy << ", outer " << outer;
      }
    }
  });
}

TEST(Steps, LeaveParametersWithoutAGradientAlone) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    for (const WithoutGradient what : {WithoutGradient::kSkip, WithoutGradient::kUpdate})
      for (const std::string& strategy : kStrategies) {
        SCOPED_TRACE(concat(strategy, " ", static_cast<int>(what)));
        Chain model = make_chain();
        const Sharded sharded = fully_shard(model, mesh, {.strategy = parse_strategy(strategy)});
        AdamW optimizer(sharded, {.lr = 0.1,
                                  .weight_decay = 0.5,
                                  .decay_spares_vectors = false,
                                  .step = {.without_gradient = what}});
        const at::Tensor frozen = model->parameters().front();
        frozen.requires_grad_(false);
        const auto value = [&] {
          const auto whole = sharded.full_parameters();
          return frozen.detach().clone();
        };
        const at::Tensor before = value();
        loss_of(model, world.rank(), 0).backward();
        optimizer.step();
        EXPECT_EQ(at::equal(before, value()), what == WithoutGradient::kSkip);
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

TEST(Rules, DecideWhatDecaysAndHowFastAndMayChangeBetweenSteps) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    Chain model = make_chain();
    const Sharded sharded = fully_shard(model, mesh);
    const std::vector<at::Tensor> before = testing::weights_of(sharded, model);
    AdamW optimizer(sharded, {.lr = 0.1,
                              .weight_decay = 0.5,
                              .rules = {{.pattern = "unit0.*|unit1.*bias", .rate_scale = 0.0},
                                        {.pattern = "unit2.linear.bias", .weight_decay = 0.25}}});
    const auto step = [&] {
      (loss_of(model, 0, 0) * 0.0).backward();  // gradients of 0: only decay moves weights
      optimizer.step();
      optimizer.zero_grad();
    };
    step();
    optimizer.set_rule(1, /*weight_decay=*/0.2, /*rate_scale=*/3.0);  // the step before is hidden
    step();
    const std::vector<at::Tensor> after = testing::weights_of(sharded, model);
    size_t i = 0;
    for (const auto& item : model->named_parameters()) {
      const std::string& name = item.key();
      double factor = name.find("weight") != std::string::npos ? std::pow(1 - 0.1 * 0.5, 2) : 1.0;
      if (name.starts_with("unit0.")) factor = 1.0;
      if (name == "unit2.linear.bias") factor = (1 - 0.1 * 0.25) * (1 - 0.3 * 0.2);
      EXPECT_TRUE(at::allclose(after[i], before[i] * factor, 1e-6, 0)) << name;
      ++i;
    }
    EXPECT_THAT(error_of([&] { optimizer.set_rule(2, 0.0, 1.0); }), HasSubstr("rule 2 does not"));
    EXPECT_THAT(error_of([&] { optimizer.set_rule(0, -1.0, 1.0); }), HasSubstr("weight_decay"));
  });
}

}  // namespace
}  // namespace fsdp::optimizer_test
