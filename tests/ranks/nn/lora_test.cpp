// Adapters of low rank: what they compute and learn beside frozen weights, however these are
// sharded or stored.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "support/run_ranks.h"
#include "support/small_models.h"

namespace fsdp::lora_test {
namespace {

using testing::run_ranks;
using testing::small_loss;
using testing::small_models;
using testing::small_tokens;
using testing::SmallModel;

constexpr int kSteps = 3;
constexpr LoraOptions kAdapters{.rank = 3};

bool is_adapter(const std::string& name) { return matches_glob(kAdapterTensors, name); }

// A Llama of sizes that every recipe divides.
ModelConfig aligned_llama() {
  LlamaConfig config = testing::small_llama();
  config.hidden_size = config.intermediate_size = 64;
  config.head_dim = 16;
  return config;
}

struct Trained {
  std::vector<double> losses = {};
  std::map<std::string, at::Tensor> before = {}, after = {};  // whole parameters that have numbers
  MemoryReport memory = {};
};

struct Training {
  ModelConfig config;
  int ranks = 1;
  MeshOptions axes = {};
  ShardOptions shard = {};
  at::ScalarType dtype = at::kFloat;
};

std::map<std::string, at::Tensor> values_of(const Sharded& sharded, const LanguageModel& model) {
  const bool is_quantized = sharded.options().quantization.recipe != WeightRecipe::kPlain;
  const auto whole = sharded.full_parameters();
  std::map<std::string, at::Tensor> values;
  for (const auto& item : model.named_parameters())
    if (!is_quantized || is_adapter(item.key())) values[item.key()] = item.value().clone();
  return values;
}

// All steps and ranks have the same tokens, so that the loss falls and the mean of two or four
// ranks' gradients is that of one, bit for bit.
Trained train(const Training& run) {
  Trained trained;
  run_ranks(run.ranks, [&](World& world) {
    const Mesh mesh = world.mesh(run.axes);
    const auto model =
        build_language_model(run.config, {.seed = 3, .dtype = run.dtype, .lora = kAdapters});
    ShardOptions options = run.shard;
    options.quantization.frozen = true;
    const Sharded sharded = fully_shard(model, mesh, options);
    sharded.drop_frozen_numbers();
    AdamW optimizer(sharded, {.lr = 1e-2});
    Trained mine{.before = values_of(sharded, *model)};
    for (int step = 0; step < kSteps; ++step) {
      const at::Tensor loss = small_loss(*model, small_tokens(0, 0, 2, 8)).total;
      mine.losses.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    mine.after = values_of(sharded, *model);
    mine.memory = sharded.memory();
    for (const ShardedParameter& each : sharded.parameters()) {
      EXPECT_EQ(each.is_trainable, is_adapter(each.name)) << each.name;
      if (!each.is_trainable) {
        EXPECT_FALSE(each.gradient.defined()) << each.name;
      }
    }
    if (world.rank() == 0) trained = std::move(mine);
  });
  return trained;
}

void expect_same(const Trained& actual, const Trained& expected, const std::string& what) {
  EXPECT_EQ(actual.losses, expected.losses) << what;
  ASSERT_EQ(actual.after.size(), expected.after.size()) << what;
  for (const auto& [name, value] : expected.after)
    EXPECT_TRUE(at::equal(actual.after.at(name), value)) << what << ": " << name;
}

TEST(Lora, BeginsWithTheModelItself) {
  for (const SmallModel& each : small_models()) {
    const auto loss = [&](const LoraOptions& lora) {
      const auto model = build_language_model(each.config, {.seed = 3, .lora = lora});
      return small_loss(*model, small_tokens(0, 0, 2, 8)).total.item<double>();
    };
    EXPECT_EQ(loss(kAdapters), loss({})) << each.name;
  }
}

// A like torch::nn::Linear's weight, B 0: what PEFT begins with.
TEST(Lora, BeginsWithTheValuesOfPeft) {
  const auto model = build_language_model(testing::small_llama(), {.seed = 3, .lora = kAdapters});
  const auto values = model->named_parameters();
  const at::Tensor a = values["model.layers.1.mlp.down_proj.lora_A.weight"];
  EXPECT_EQ(a.sizes(), (std::vector<int64_t>{3, 29}));
  const double bound = 1.0 / std::sqrt(29.0);
  EXPECT_LE(a.abs().max().item<double>(), bound);
  EXPECT_GT(a.abs().max().item<double>(), 0.9 * bound);
  EXPECT_EQ(values["model.layers.1.mlp.down_proj.lora_B.weight"].abs().max().item<double>(), 0.0);
}

TEST(Lora, OfEveryModelLearnsTheSameShardedAsAlone) {
  for (const SmallModel& each : small_models()) {
    const Trained alone = train({.config = each.config});
    EXPECT_LT(alone.losses.back(), alone.losses.front()) << each.name;
    expect_same(train({.config = each.config, .ranks = 2}), alone, each.name);
    for (const auto& [name, value] : alone.before)
      EXPECT_EQ(at::equal(alone.after.at(name), value), !is_adapter(name)) << each.name << name;
  }
}

TEST(Lora, LearnsTheSameByEveryStrategy) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const WeightRecipe recipe : {WeightRecipe::kPlain, WeightRecipe::kFp8Row}) {
      Training run{
          .config = aligned_llama(), .shard = {.quantization = {.recipe = recipe}}, .dtype = dtype};
      const Trained alone = train(run);
      run.ranks = 4;
      run.axes = {.outer = 2};
      for (const Strategy& strategy : named_strategies()) {
        run.shard.strategy = strategy;
        expect_same(train(run), alone, concat(to_text(strategy), " ", row_of(recipe).name));
      }
    }
}

// Codes of rows differ from numbers by up to 1/16 of them, and a model of random weights by less.
TEST(Lora, OnCodesAlmostLearnsWhatItLearnsOnNumbers) {
  const Trained plain = train({.config = aligned_llama(), .ranks = 2});
  for (const WeightRecipe recipe : {WeightRecipe::kFp8Row, WeightRecipe::kFp8Block}) {
    const Trained codes = train(
        {.config = aligned_llama(), .ranks = 2, .shard = {.quantization = {.recipe = recipe}}});
    for (size_t i = 0; i < plain.losses.size(); ++i)
      EXPECT_NEAR(codes.losses[i], plain.losses[i], 0.02 * plain.losses[i]) << i;
    EXPECT_LT(codes.memory.weight_bytes, plain.memory.weight_bytes / 2);
    // Only adapters have gradients and moments; no numbers are left beside codes.
    EXPECT_EQ(codes.memory.main_grad_bytes, plain.memory.main_grad_bytes);
    EXPECT_EQ(codes.memory.moment_bytes, plain.memory.moment_bytes);
    EXPECT_EQ(codes.memory.main_weight_bytes, 0);
  }
}

TEST(Lora, RefusesWhatItCannotDo) {
  const auto words = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(words([] {
                static_cast<void>(build_language_model(
                    testing::small_llama(), {.lora = {.rank = 2, .on = {"q_proj", "w_proj"}}}));
              }),
              ::testing::HasSubstr("--lora-on has 'w_proj', which names no linear layer of the "
                                   "model's blocks; they are down_proj, gate_proj, k_proj, o_proj, "
                                   "q_proj, up_proj, v_proj"));
  run_ranks(2, [&](World& world) {
    const Mesh mesh = world.mesh({.tp = 2});
    const auto model = build_language_model(aligned_llama(), {.lora = kAdapters});
    EXPECT_THAT(words([&] { static_cast<void>(fully_shard(model, mesh, {})); }),
                ::testing::HasSubstr("ranks of a tp group do not share out"));
  });
}

}  // namespace
}  // namespace fsdp::lora_test
