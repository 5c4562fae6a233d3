// Qwen3-Next's configuration: its fields in config.json, its rules, and what a token costs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "fsdp/base/error.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/flops.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::qwen3_next_config_test {
namespace {

using ::testing::HasSubstr;
using testing::refusal;

// Gated DeltaNet twice, then attention.
Qwen3NextConfig next() {
  return {.decoder = {.vocab_size = 100,
                      .hidden_size = 48,
                      .num_hidden_layers = 3,
                      .num_attention_heads = 6,
                      .num_key_value_heads = 2,
                      .head_dim = 8,
                      .intermediate_size = 77},
          .layer_types = {LayerType::kLinearAttention, LayerType::kLinearAttention,
                          LayerType::kFullAttention},
          .linear_num_key_heads = 2,
          .linear_num_value_heads = 4,
          .linear_key_head_dim = 8,
          .linear_value_head_dim = 12,
          .linear_conv_kernel_dim = 3,
          .num_experts = 5,
          .num_experts_per_tok = 2,
          .moe_intermediate_size = 20,
          .shared_expert_intermediate_size = 10};
}

Qwen3NextConfig parsed(const std::string& fields) {
  return std::get<Qwen3NextConfig>(parse_model_config(
      R"({"model_type": "qwen3_next", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 5,
          "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8)" +
          fields + "}",
      "c.json"));
}

// No field at its default, so that one that is not written or not read shows.
TEST(Qwen3NextConfig, BringsEveryFieldBack) {
  Qwen3NextConfig changed = next();
  changed.decoder.attention_bias = changed.decoder.tie_word_embeddings = true;
  changed.decoder.rms_norm_eps = 1e-4;
  changed.decoder.rope_theta = 500000.0;
  changed.decoder.rope_scaling = Llama3RopeScaling{16.0, 2.0, 5.0, 4096};
  changed.decoder.max_position_embeddings = 1234;
  changed.decoder.initializer_range = 0.1;
  changed.partial_rotary_factor = 0.5;
  changed.norm_topk_prob = false;
  changed.router_aux_loss_coef = 0.5;
  changed.decoder_sparse_step = 2;
  changed.mlp_only_layers = {1, 2};
  for (const Qwen3NextConfig& config : {next(), changed}) {
    const std::string text = config_json(config);
    EXPECT_TRUE(parse_model_config(text, "c.json") == ModelConfig(config)) << text;
  }
}

TEST(Qwen3NextConfig, HasThePackagesDefaults) {
  const Qwen3NextConfig config = parsed("");
  EXPECT_EQ(config.decoder.head_dim, 256);
  EXPECT_EQ(config.decoder.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.decoder.max_position_embeddings, 32768);
  EXPECT_EQ(config.partial_rotary_factor, 0.25);
  EXPECT_EQ(config.linear_num_value_heads, 32);
  EXPECT_EQ(config.num_experts, 512);
  EXPECT_EQ(config.num_experts_per_tok, 10);
}

TEST(Qwen3NextConfig, ReadsBothFormsOfPartialPositions) {
  EXPECT_EQ(parsed(R"(, "partial_rotary_factor": 0.5)").partial_rotary_factor, 0.5);
  EXPECT_EQ(parsed(R"(, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 7})")
                .partial_rotary_factor,
            0.5);
}

// A list, how often attention comes, or every fourth layer.
TEST(Qwen3NextConfig, ReadsWhichLayersAreAttention) {
  const auto layers_of = [](const std::string& fields) {
    const Qwen3NextConfig config = parsed(fields);
    std::string text;
    for (int64_t layer = 0; layer < 5; ++layer)
      text += layer_type_of(config, layer) == LayerType::kFullAttention ? '*' : 'D';
    return text;
  };
  EXPECT_EQ(layers_of(""), "DDD*D");
  EXPECT_EQ(layers_of(R"(, "full_attention_interval": 2)"), "D*D*D");
  const std::string list =
      R"(, "layer_types": ["full_attention", "linear_attention", "linear_attention",
                           "linear_attention", "full_attention"])";
  EXPECT_EQ(layers_of(list), "*DDD*");
  EXPECT_EQ(layers_of(R"(, "full_attention_interval": 2)" + list), "*DDD*");
}

TEST(Qwen3NextConfig, NamesFileFieldValueAndFix) {
  const auto refused = [](const std::string& fields) { return refusal([&] { parsed(fields); }); };
  EXPECT_THAT(refused(R"(, "layer_types": ["mamba"])"),
              HasSubstr("the known layers are linear_attention and full_attention"));
  EXPECT_THAT(refused(R"(, "full_attention_interval": 0)"),
              HasSubstr("c.json: full_attention_interval is 0; it must be at least 1"));
  EXPECT_THAT(refused(R"(, "mlp_only_layers": ["a"])"), HasSubstr("c.json: mlp_only_layers is"));
}

// Such a model can be planned; training it says why not.
TEST(Qwen3NextConfig, RemembersThatPredictionLayersAreNotComputed) {
  const Qwen3NextConfig config = parsed(R"(, "num_nextn_predict_layers": 1)");
  EXPECT_NO_THROW(build_model("m", config));
  EXPECT_EQ(refusal([&] { check_trainable(config); }),
            "c.json: num_nextn_predict_layers is 1; only 0 is computed");
}

TEST(Qwen3NextConfig, RefusesWhatCannotBeComputed) {
  const auto refused = [](const auto& change) {
    Qwen3NextConfig config = next();
    change(config);
    return refusal([&] { check_trainable(config); });
  };
  EXPECT_EQ(refused([](Qwen3NextConfig&) {}), "accepted");
  EXPECT_THAT(refused([](Qwen3NextConfig& c) { c.linear_num_key_heads = 3; }),
              HasSubstr("linear_num_key_heads is 3; it must divide linear_num_value_heads = 4"));
  EXPECT_THAT(refused([](Qwen3NextConfig& c) { c.layer_types.pop_back(); }),
              HasSubstr("layer_types has 2 entries; it needs one for each of"));
  EXPECT_THAT(refused([](Qwen3NextConfig& c) { c.mlp_only_layers = {3}; }),
              HasSubstr("mlp_only_layers is 3; it must be a whole number from 0 to 2"));
  EXPECT_THAT(refused([](Qwen3NextConfig& c) { c.partial_rotary_factor = 0.2; }),
              HasSubstr("partial_rotary_factor is 0.2; times head_dim = 8 it must be an even"));
  EXPECT_THAT(refused([](Qwen3NextConfig& c) { c.num_experts_per_tok = 6; }),
              HasSubstr("num_experts_per_tok is 6"));
  EXPECT_THAT(refused([](Qwen3NextConfig& c) { c.decoder.num_nextn_predict_layers = 1; }),
              HasSubstr("num_nextn_predict_layers is above 0"));
}

TEST(Qwen3NextConfig, RefusesRanksThatCannotComputeItTogether) {
  const auto refused = [](const ModelConfig& config, int64_t tp) {
    return refusal([&] { check_tensor_ranks(config, tp); });
  };
  Qwen3NextConfig config = next();
  EXPECT_EQ(refused(config, 2), "accepted");
  config.mlp_only_layers = {1};
  EXPECT_THAT(refused(config, 2), HasSubstr("intermediate_size is 77, which tp = 2 ranks cannot"));
  config.linear_num_key_heads = 1;
  EXPECT_THAT(refused(config, 2), HasSubstr("linear_num_key_heads is 1, which tp = 2 ranks"));
}

TEST(Qwen3NextConfig, CountsTheProductsOfTheDeltaRule) {
  // No product has the embedding, the norms of layers, heads and mixers, and what decays.
  const int64_t unused = 100 * 48 + 7 * 48 + 2 * 8 + 2 * (12 + 2 * 4);
  const int64_t idle = 3 * 3 * 3 * 20 * 48;  // three of five experts, three matrices, three layers
  const auto weights = static_cast<double>(build_model("m", next()).parameters() - unused - idle);
  const double attention = 2.0 * 48 * (63 + 1) / 2.0;
  const double overlaps = 2.0 * 63 * 2 * 8;
  const double within = 4 * 63 * (63 / 2.0 + 8 + 2 * 12);
  const double states = 4 * (8 * 8 + 8 * 8 * 12 / 63.0 + 3 * 8 * 12);
  EXPECT_NEAR(flops_per_token(next(), 63),
              6 * (weights + attention + 2 * (overlaps + within + states)), 1e-3);
}

}  // namespace
}  // namespace fsdp::qwen3_next_config_test
