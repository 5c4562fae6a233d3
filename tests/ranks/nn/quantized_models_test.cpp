// Language models with quantised weights: what does not change numbers elsewhere changes none here.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "support/one_in.h"
#include "support/run_ranks.h"
#include "support/small_models.h"
#include "support/test_device.h"

namespace fsdp::quantized_models_test {
namespace {

using testing::run_ranks;
using testing::small_loss;
using testing::small_tokens;
using testing::test_device;

constexpr int kSteps = 3;

ModelConfig aligned_model() {
  MixtralConfig config = testing::aligned_mixtral();
  config.decoder.head_dim = 16;
  config.decoder.intermediate_size = config.shared_expert_intermediate_size = 64;
  config.decoder.num_nextn_predict_layers = 1;
  return config;
}

struct Variant {
  std::string name;
  std::function<void(ShardOptions&)> shard = [](ShardOptions&) {};
  std::function<void(StepOptions&)> step = [](StepOptions&) {};
  Recompute recompute = Recompute::kNone;
};

std::vector<double> losses_of(const Variant& variant, WeightRecipe recipe, MeshOptions axes = {},
                              int ranks = 2) {
  std::vector<double> losses;
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh = world.mesh(axes);
    const auto model =
        build_language_model(aligned_model(), {.seed = 3, .recompute = variant.recompute});
    model->to(test_device());
    ShardOptions options{.quantization = {.recipe = recipe}};
    variant.shard(options);
    StepOptions step{.max_norm = 1.0};
    variant.step(step);
    const Sharded sharded = fully_shard(model, mesh, options);
    AdamW optimizer(sharded, {.lr = 1e-3, .step = step});
    for (int number = 0; number < kSteps; ++number) {
      const at::Tensor loss =
          small_loss(*model, small_tokens(static_cast<int>(mesh.data_parallel_rank()), number, 2, 8)
                                 .to(test_device()))
              .total;
      if (world.rank() == 0) losses.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  return losses;
}

TEST(QuantizedModels, LearnTheSameWhereverWeightsLieAndWheneverTheyAreUpdated) {
  std::vector<Variant> variants;
  for (const PoolKind pool : all_pool_kinds())
    variants.push_back(
        {concat("pool ", name_of(pool)), [pool](ShardOptions& o) { o.pool = pool; }});
  variants.push_back({"prefetch 2", [](ShardOptions& o) { o.prefetch = 2; }});
  for (const char* strategy : {"no_shard", "optim", "optim_grads"})
    variants.push_back(
        {strategy, [strategy](ShardOptions& o) { o.strategy = parse_strategy(strategy); }});
  variants.push_back({"gradients of a step",
                      [](ShardOptions& o) { o.gradient_lifetime = GradientLifetime::kStep; }});
  variants.push_back({"rows", [](ShardOptions& o) { o.granularity = Granularity::row(); }});
  variants.push_back({"blocking updates", [](ShardOptions&) {},
                      [](StepOptions& o) { o.updates = Updates::kBlocking; }});
  for (const double fraction : {0.3, 1.0})
    variants.push_back({concat("offload ", fraction), [fraction](ShardOptions& o) {
                          o.offload = {.fraction = fraction, .chunk_numel = 256};
                        }});
  variants.push_back({.name = "recomputed", .recompute = Recompute::kBlock});
  // Each variant by every recipe; `make test` takes a third of them.
  testing::OneIn few(3);
  for (const WeightRecipe recipe :
       {WeightRecipe::kFp8Row, WeightRecipe::kFp8Tensor, WeightRecipe::kFp8Block}) {
    const std::vector<double> expected = losses_of({.name = "as it comes"}, recipe);
    for (const Variant& variant : variants)
      if (!few.skips()) {
        EXPECT_EQ(losses_of(variant, recipe), expected)
            << row_of(recipe).name << ", " << variant.name;
      }
  }
}

// Codes differ from numbers by up to 1/16 of them, and a model of random weights little by that.
TEST(QuantizedModels, LearnAlmostWhatPlainOnesDoOnEveryAxis) {
  const std::vector<double> plain = losses_of({.name = "plain"}, WeightRecipe::kPlain, {}, 2);
  for (const WeightRecipeRow& row : all_weight_recipes())
    for (const MeshOptions& axes :
         {MeshOptions{.ep = 2}, {.tp = 2}, {.outer = 2, .ep = 4, .tp = 2}}) {
      const int ranks = axes.tp == 1 ? 2 : 4;
      const std::vector<double> losses = losses_of({.name = "axes"}, row.recipe, axes, ranks);
      for (size_t i = 0; i < plain.size(); ++i)
        EXPECT_NEAR(losses[i], plain[i], 0.02 * plain[i])
            << row.name << " ep " << axes.ep << " tp " << axes.tp << " step " << i;
    }
}

TEST(QuantizedModels, KeepTheirCodesWhenAStepIsSkipped) {
  run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh();
    const auto model = build_language_model(aligned_model(), {.seed = 3});
    model->to(test_device());
    const Sharded sharded =
        fully_shard(model, mesh, {.quantization = {.recipe = WeightRecipe::kFp8Row}});
    AdamW optimizer(sharded, {.lr = 1e-3, .step = {.on_nonfinite = OnNonfinite::kSkip}});
    const auto loss = [&] {
      return small_loss(*model, small_tokens(0, 0, 2, 8).to(test_device())).total;
    };
    const double before = loss().item<double>();
    (loss() * (world.rank() == 0 ? std::numeric_limits<double>::quiet_NaN() : 1.0)).backward();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_EQ(loss().item<double>(), before);
    loss().backward();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_LT(loss().item<double>(), before);
  });
}

}  // namespace
}  // namespace fsdp::quantized_models_test
