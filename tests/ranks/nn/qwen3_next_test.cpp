// Qwen3-Next on ranks that share its heads, its experts or both: the same losses and weights as of
// the whole model, and the same first values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/model/trained_model.h"
#include "support/layer_gradients.h"
#include "support/sharded_training.h"
#include "support/small_models.h"
#include "support/temp_dir.h"
#include "support/test_device.h"

namespace fsdp::nn::qwen3_next_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;

constexpr int kSteps = 3;

// Four ranks can share all heads; two value heads belong to each key head.
Qwen3NextConfig next() {
  Qwen3NextConfig config = testing::small_qwen3_next();
  config.decoder.vocab_size = 40;
  config.decoder.num_attention_heads = 8;
  config.decoder.num_key_value_heads = 4;
  config.decoder.intermediate_size = 32;
  config.linear_num_key_heads = 4;
  config.linear_num_value_heads = 8;
  config.num_experts = 8;
  return config;
}

std::shared_ptr<LanguageModel> build(const Qwen3NextConfig& config,
                                     Recompute recompute = Recompute::kNone) {
  const auto model = build_language_model(config, {.seed = 3, .recompute = recompute});
  testing::disturb(*model);
  model->to(testing::test_device());
  return model;
}

at::Tensor loss_of(const std::shared_ptr<LanguageModel>& model, int loss, int step) {
  return testing::small_loss(*model,
                             testing::small_tokens(loss, step, 2, 8).to(testing::test_device()))
      .total;
}

struct Grids {
  int ranks;
  MeshOptions mesh;
  int num_losses() const { return ranks / mesh.tp; }
};

std::string text(const Grids& grids) {
  return concat(grids.ranks, " ranks, outer ", grids.mesh.outer, ", ep ", grids.mesh.ep, ", tp ",
                grids.mesh.tp);
}

// All factorisations of two and four ranks but the one without any of these axes.
std::vector<Grids> all_grids() {
  std::vector<Grids> all;
  for (const int ranks : {2, 4})
    for (int outer = 1; outer <= ranks; outer *= 2)
      for (int tp = 1; outer * tp <= ranks; tp *= 2)
        for (int ep = 1; ep <= ranks; ep *= 2)
          if (tp * ep > 1) all.push_back({ranks, {.outer = outer, .ep = ep, .tp = tp}});
  return all;
}

// A checkpoint has the whole weights, whatever slices ranks have of them.
std::vector<at::Tensor> stored_weights(const std::string& directory,
                                       const Qwen3NextConfig& config) {
  std::vector<at::Tensor> weights;
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    const auto model = build(config);
    const Sharded sharded = fully_shard(model, mesh);
    load_checkpoint(directory, {.sharded = sharded}, {.names = train::stored_name_rules(*model)});
    weights = testing::weights_of(sharded, model);
  });
  return weights;
}

TEST(ParallelQwen3Next, LearnsWhatTheWholeModelLearns) {
  const std::span<const Strategy> strategies = named_strategies();
  std::map<int, std::vector<at::Tensor>> expected;  // by number of losses
  size_t number = 0;
  for (const Grids& grids : all_grids()) {
    const int num_losses = grids.num_losses();
    if (!expected.contains(num_losses))
      expected[num_losses] = testing::train_plain(build(next()), num_losses, kSteps, loss_of);
    const testing::TempDir directory;
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      const auto model = build(next(), number % 2 == 0 ? Recompute::kNone : Recompute::kBlock);
      const Sharded sharded =
          fully_shard(model, mesh, {.strategy = strategies[number % strategies.size()]});
      testing::train(model, sharded, mesh.loss(), kSteps, loss_of);
      save_checkpoint(directory.path(), {.sharded = sharded}, {.step = kSteps},
                      {.form = {.names = train::stored_name_rules(*model)}});
    });
    ++number;
    testing::expect_close(stored_weights(directory.path(), next()), expected[num_losses],
                          text(grids));
  }
}

// Steps [first, last) of four losses each, from the checkpoint in `directory` and to it.
void train_on(const Grids& grids, double offload, int first, int last,
              const std::string& directory) {
  run_ranks(grids.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(grids.mesh);
    const auto model = build(next());
    const Sharded sharded = fully_shard(model, mesh, {.offload = {.fraction = offload}});
    AdamW optimizer(sharded, {.lr = 1e-2, .eps = 1e-2});
    const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
    const auto names = train::stored_name_rules(*model);
    if (first > 0) load_checkpoint(directory, state, {.names = names});
    const int num_microbatches = 4 / mesh.num_losses();
    for (int step = first; step < last; ++step) {
      for (int i = 0; i < num_microbatches; ++i) {
        sharded.microbatch({.last = i + 1 == num_microbatches});
        (loss_of(model, mesh.loss() * num_microbatches + i, step) / num_microbatches).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    save_checkpoint(directory, state, {.step = last}, {.form = {.names = names}});
  });
}

TEST(ParallelQwen3Next, GoesOnOnOtherRanksWithItsOptimizerOnTheHost) {
  const testing::TempDir straight;
  train_on({1, {}}, 0.0, 0, 4, straight.path());
  const testing::TempDir resumed;
  train_on({2, {}}, 0.5, 0, 2, resumed.path());
  train_on({4, {.outer = 2}}, 0.5, 2, 4, resumed.path());
  testing::expect_close(stored_weights(resumed.path(), next()),
                        stored_weights(straight.path(), next()), "resumed");
}

TEST(ParallelQwen3Next, HasTheSameFirstValuesOnAllGrids) {
  const std::vector<at::Tensor> expected = build_language_model(next(), {.seed = 5})->parameters();
  for (const Grids& grids : {Grids{2, {.tp = 2}}, Grids{4, {.ep = 4, .tp = 4}}}) {
    const testing::TempDir directory;
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      const auto model = [&] {
        const MetaConstruction without_memory;
        return build_language_model(next(), {.seed = 5});
      }();
      const Sharded sharded = fully_shard(model, mesh);
      save_checkpoint(directory.path(), {.sharded = sharded}, {},
                      {.form = {.names = train::stored_name_rules(*model)}});
    });
    const std::vector<at::Tensor> values = stored_weights(directory.path(), next());
    ASSERT_EQ(values.size(), expected.size());
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_TRUE(at::equal(values[i].cpu(), expected[i])) << text(grids) << ", parameter " << i;
  }
}

TEST(ParallelQwen3Next, HasAllLogitsOnEveryRank) {
  const at::Tensor tokens = testing::small_tokens(0, 0, 2, 7).to(testing::test_device());
  const at::Tensor expected = build(next())->logits(tokens).detach();
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh({.ep = 2, .tp = 4});
    const auto model = build(next());
    const Sharded sharded = fully_shard(model, mesh);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(model->logits(tokens), expected, 1e-4, 1e-5));
  });
}

TEST(ParallelQwen3Next, RefusesWhatTheRanksCannotShare) {
  const auto error_of_sharding = [](const Qwen3NextConfig& config, int tp) {
    std::string message;
    run_ranks(tp, [&](World& world) {
      const Mesh mesh = world.mesh({.tp = tp});
      const std::string mine =
          testing::error_of<UsageError>([&] { fully_shard(build(config), mesh); });
      if (world.rank() == 0) message = mine;
    });
    return message;
  };
  Qwen3NextConfig few_keys = next();
  few_keys.linear_num_key_heads = 2;
  EXPECT_THAT(error_of_sharding(few_keys, 4),
              AllOf(HasSubstr("linear_num_key_heads is 2"), HasSubstr("tp = 4")));
  Qwen3NextConfig few_attention = next();
  few_attention.decoder.num_key_value_heads = 2;
  EXPECT_THAT(error_of_sharding(few_attention, 4),
              AllOf(HasSubstr("num_key_value_heads is 2"), HasSubstr("tp = 4")));
}

TEST(Qwen3Next, BeginsWithFactorsOfOneInAllNorms) {
  const auto model = build_language_model(testing::small_qwen3_next(), {.seed = 3});
  for (const auto& item : model->named_parameters()) {
    if (item.key().find("norm") == std::string::npos) continue;
    const double first = item.key().ends_with("linear_attn.norm.weight") ? 1.0 : 0.0;
    EXPECT_TRUE(at::equal(item.value(), at::full_like(item.value(), first))) << item.key();
  }
}

// Rounded once, to half a unit of bf16, though bf16 has no factor for such a weight.
TEST(Qwen3Next, NormsByWeightsThatAreNotRoundedToFactors) {
  RmsNorm norm(64, 1e-6, NormWeight::kZeroCentred);
  {
    const at::NoGradGuard no_grad;
    norm->weight.fill_(0.003);
  }
  norm->to(at::kBFloat16);
  const at::Tensor x = testing::waves({5, 64}, 0.5).to(at::kBFloat16);
  const at::Tensor exact = at::rms_norm(x.to(at::kDouble), {64}, {}, 1e-6) *
                           (1.0 + norm->weight.detach().to(at::kDouble));
  const at::Tensor y = norm(x).detach().to(at::kDouble);
  EXPECT_LE(((y - exact) / exact).abs().max().item<double>(), 0x1.01p-8);
}

}  // namespace
}  // namespace fsdp::nn::qwen3_next_test
