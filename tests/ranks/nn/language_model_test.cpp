// Language models: their units and first values, and that sharding changes nothing of what they
// learn.
#include "fsdp/nn/language_model.h"
#include "fsdp/base/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "fsdp/base/error.h"
#include "fsdp/comm/world.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/shard/module_units.h"
#include "fsdp/shard/parameter_init.h"
#include "support/run_ranks.h"
#include "support/sharded_training.h"
#include "support/small_models.h"

namespace fsdp::language_model_test {
namespace {

using testing::small_loss;
using testing::small_models;
using testing::small_tokens;
using testing::SmallModel;
using testing::stored_tensors;

using Values = std::map<std::string, at::Tensor>;

Values values_of(const torch::nn::Module& model) {
  Values values;
  for (const auto& item : model.named_parameters()) values[item.key()] = item.value().clone();
  return values;
}

void expect_same_bits(const Values& actual, const Values& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(at::equal(actual.at(name), value)) << what << ": " << name;
}

// Units as fully_shard() finds them, under the names of published checkpoints.
std::map<std::string, std::vector<std::string>> units_of(
    const std::shared_ptr<LanguageModel>& model) {
  std::map<std::string, std::vector<std::string>> units;
  for (const FoundUnit& unit : find_units(model, {}).units)
    for (const OwnedParameter& parameter : unit.parameters)
      for (const auto& [name, part] :
           stored_tensors(*model, parameter.names.front(), parameter.tensor))
        units[unit.name].push_back(
            name + " " + list_text(part.sizes().vec()) +
            (std::holds_alternative<PerExpert>(parameter.declared) ? " expert" : ""));
  return units;
}

std::map<std::string, std::vector<std::string>> units_of(const ModelShape& model) {
  std::map<std::string, std::vector<std::string>> units;
  for (const UnitShape& unit : model.units)
    for (const TensorShape& tensor : unit.tensors) {
      std::vector<int64_t> shape = tensor.shape;
      if (!tensor.parts.empty()) shape[0] /= static_cast<int64_t>(tensor.parts.size());
      for (const std::string& name : tensor.parts.empty() ? std::vector{tensor.name} : tensor.parts)
        units[unit.name].push_back(name + " " + list_text(shape) +
                                   (tensor.num_experts > 0 ? " expert" : ""));
    }
  return units;
}

TEST(LanguageModel, HasTheUnitsAndTensorsThatPlanningCountsOn) {
  std::vector<SmallModel> models = small_models();
  for (const ModelPreset& preset : model_presets()) models.push_back({preset.name, preset.config});
  for (const SmallModel& each : models) {
    const MetaConstruction without_memory;
    EXPECT_EQ(units_of(build_language_model(each.config)),
              units_of(build_model(each.name, each.config)))
        << each.name;
  }
}

// DeepSeek-V3's layer of multi-token prediction has copies of embedding and head; a model without
// such a layer leaves all of it out.
TEST(LanguageModel, IgnoresWhatPublishedCheckpointsHaveBesideIt) {
  const MetaConstruction without_memory;
  DeepseekV3Config config = testing::small_deepseek();
  EXPECT_EQ(build_language_model(config)->ignored_names(),
            (std::vector<std::string>{"model.layers.2.embed_tokens.weight",
                                      "model.layers.2.shared_head.head.weight"}));
  config.decoder.num_nextn_predict_layers = 0;
  EXPECT_EQ(build_language_model(config)->ignored_names(),
            (std::vector<std::string>{"model.layers.2.*"}));
}

// Narrow values are the rounded ones.
TEST(LanguageModel, FirstValuesDependOnSeedAndNameAlone) {
  for (const SmallModel& each : small_models())
    for (const auto& [type, ranks] : {std::pair{at::kFloat, 3}, {at::kBFloat16, 2}}) {
      Values expected = values_of(*build_language_model(each.config, {.seed = 5}));
      for (auto& [name, value] : expected) value = value.to(type);
      const BuildOptions options{.seed = 5, .dtype = type};
      expect_same_bits(values_of(*build_language_model(each.config, options)), expected, each.name);
      testing::run_ranks(ranks, [&](World& world) {
        const std::shared_ptr<LanguageModel> model = [&] {
          const MetaConstruction without_memory;
          return build_language_model(each.config, options);
        }();
        const Mesh mesh = world.mesh();
        const Sharded sharded = fully_shard(model, mesh, {});
        const auto whole = sharded.full_parameters();
        expect_same_bits(values_of(*model), expected, each.name + " on meta");
      });
    }
}

TEST(LanguageModel, OtherSeedsAndNamesHaveOtherValues) {
  const ModelConfig config = testing::small_llama();
  const Values first = values_of(*build_language_model(config, {.seed = 1}));
  const Values second = values_of(*build_language_model(config, {.seed = 2}));
  const char* gate = "model.layers.0.mlp.gate_proj.weight";
  EXPECT_FALSE(at::equal(first.at(gate), second.at(gate)));
  EXPECT_FALSE(at::equal(first.at(gate), first.at("model.layers.0.mlp.up_proj.weight")));
  EXPECT_FALSE(at::equal(first.at(gate), first.at("model.layers.1.mlp.gate_proj.weight")));
}

TEST(LanguageModel, FirstValuesAreNormalWithTheConfiguredDeviation) {
  LlamaConfig config = testing::small_llama();
  config.hidden_size = 512;
  config.vocab_size = 500;
  config.initializer_range = 0.03;
  const at::Tensor value =
      values_of(*build_language_model(config)).at("model.embed_tokens.weight") / 0.03;
  // 256,000 numbers: the standard errors are 0.002 (mean), 0.0014 (deviation), 0.0011 and 0.0007
  // (shares); six of each.
  EXPECT_NEAR(value.mean().item<double>(), 0.0, 0.012);
  EXPECT_NEAR(value.std().item<double>(), 1.0, 0.0085);
  EXPECT_NEAR(value.abs().lt(1.0).to(at::kFloat).mean().item<double>(), 0.6827, 0.006);
  EXPECT_NEAR(value.abs().gt(2.0).to(at::kFloat).mean().item<double>(), 0.0455, 0.0027);
  EXPECT_LT(value.abs().max().item<double>(), 6.5);
}

TEST(LanguageModel, BeginsWithFactorsOfOneInNormsAroundZero) {
  const auto model = build_language_model(testing::small_qwen3_next(), {.seed = 3});
  for (const auto& item : model->named_parameters()) {
    if (item.key().find("norm") == std::string::npos) continue;
    const double first = item.key().ends_with("linear_attn.norm.weight") ? 1.0 : 0.0;
    EXPECT_TRUE(at::equal(item.value(), at::full_like(item.value(), first))) << item.key();
  }
}

at::Tensor loss_of(const std::shared_ptr<LanguageModel>& model, int rank, int step) {
  return small_loss(*model, small_tokens(rank, step)).total;
}

// Prediction layers use embedding and head again: one forward all the same, whose order is known
// after the first step, so that every unit stays in its slot.
TEST(LanguageModel, LearnsTheSameShardedAndWhole) {
  for (const SmallModel& each : small_models())
    for (const auto& [ranks, recompute] :
         {std::pair{2, Recompute::kNone}, {3, Recompute::kBlock}}) {
      const auto build = [&](Recompute how) {
        const auto model = build_language_model(each.config, {.seed = 3, .recompute = how});
        testing::disturb(*model);
        return model;
      };
      const std::vector<at::Tensor> plain =
          testing::train_plain(build(Recompute::kNone), ranks, 3, loss_of);
      testing::run_ranks(ranks, [&, how = recompute](World& world) {
        const auto model = build(how);
        const Mesh mesh = world.mesh();
        const Sharded sharded =
            fully_shard(model, mesh, {.pool = PoolKind::kMaxPool, .on_move = OnMove::kRefuse});
        testing::train(model, sharded, world.rank(), 3, loss_of);
        testing::expect_close(testing::weights_of(sharded, model), plain, each.name);
      });
    }
}

Values gradients_of(const ModelConfig& config, const BuildOptions& options) {
  const auto model = build_language_model(config, options);
  small_loss(*model, small_tokens(0, 0)).total.backward();
  Values gradients;
  for (const auto& item : model->named_parameters())
    if (item.value().grad().defined()) gradients[item.key()] = item.value().grad();
  return gradients;
}

TEST(LanguageModel, RecomputingChangesNoBit) {
  for (const SmallModel& each : small_models())
    expect_same_bits(gradients_of(each.config, {.seed = 3, .recompute = Recompute::kBlock}),
                     gradients_of(each.config, {.seed = 3}), each.name);
}

// Untied and tied heads, and heads that predict more tokens: their weight gets gradients of all
// uses. Only the order of sums differs.
TEST(LanguageModel, HasTheSameGradientsWithLogitsOfAnyNumberOfTokens) {
  for (const SmallModel& each : small_models()) {
    if (!each.name.starts_with("llama")) continue;
    const Values expected = gradients_of(each.config, {.seed = 3});
    const Values actual =
        gradients_of(each.config, {.seed = 3, .logit_bytes = 5 * 37 * int64_t{sizeof(float)}});
    for (const auto& [name, value] : expected) {
      const double scale = std::max(1e-3, value.abs().max().item<double>());
      EXPECT_LT((actual.at(name) - value).abs().max().item<double>(), 2e-5 * scale)
          << each.name << ": " << name;
    }
  }
}

TEST(LanguageModel, TrainsInBf16) {
  for (const SmallModel& each : small_models()) {
    const auto model = build_language_model(each.config, {.seed = 3, .dtype = at::kBFloat16});
    const auto exact = build_language_model(each.config, {.seed = 3});
    const ModelLoss loss = small_loss(*model, small_tokens(0, 0));
    loss.total.backward();
    EXPECT_EQ(loss.total.scalar_type(), at::kFloat) << each.name;
    // Logits are near 0 in the beginning, so the losses are log(37) within a few hundredths.
    EXPECT_NEAR(loss.total.item<double>(),
                small_loss(*exact, small_tokens(0, 0)).total.item<double>(), 0.02)
        << each.name;
  }
}

TEST(LanguageModel, RefusesWhatItDoesNotCompute) {
  LlamaConfig config = testing::small_llama();
  config.not_computed = "c.json: hidden_act is \"gelu\"; only \"silu\" is computed";
  EXPECT_THAT([&] { build_language_model(config); },
              ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("hidden_act is")));
}

}  // namespace
}  // namespace fsdp::language_model_test
