// DeepSeek-V3's configuration: its fields in config.json, its rules, and what a token costs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdp/nn/config/config_differences.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/flops.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::deepseek_v3_config_test {
namespace {

using ::testing::HasSubstr;
using testing::refusal;

// A dense layer, then two with experts.
DeepseekV3Config deepseek() {
  return {.decoder = {.vocab_size = 100,
                      .hidden_size = 48,
                      .num_hidden_layers = 3,
                      .num_attention_heads = 6,
                      .num_key_value_heads = 6,
                      .head_dim = 8,
                      .intermediate_size = 77},
          .q_lora_rank = 20,
          .kv_lora_rank = 16,
          .qk_nope_head_dim = 12,
          .v_head_dim = 10,
          .first_k_dense_replace = 1,
          .n_routed_experts = 8,
          .n_shared_experts = 2,
          .num_experts_per_tok = 3,
          .moe_intermediate_size = 14,
          .n_group = 4,
          .topk_group = 2};
}

DeepseekV3Config parsed(const std::string& fields) {
  return std::get<DeepseekV3Config>(parse_model_config(
      R"({"model_type": "deepseek_v3", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 5,
          "num_attention_heads": 2, "intermediate_size": 8)" +
          fields + "}",
      "c.json"));
}

// No field at its default, so that one that is not written or not read shows.
TEST(DeepseekV3Config, BringsEveryFieldBack) {
  DeepseekV3Config changed = deepseek();
  changed.decoder.attention_bias = changed.decoder.tie_word_embeddings = true;
  changed.decoder.rms_norm_eps = 1e-4;
  changed.decoder.rope_theta = 500000.0;
  changed.decoder.rope_scaling = YarnRopeScaling{40.0, 1024, 31.0, 2.0, 1.0, 0.5};
  changed.decoder.max_position_embeddings = 1234;
  changed.decoder.initializer_range = 0.1;
  changed.decoder.num_nextn_predict_layers = 2;
  changed.decoder.mtp_loss_weight = 0.25;
  changed.rope_interleave = changed.norm_topk_prob = false;
  changed.routed_scaling_factor = 1.5;
  changed.router_bias_update_rate = 0.25;
  changed.router_aux_loss_coef = 0.125;
  DeepseekV3Config direct = changed;
  direct.q_lora_rank = 0;
  direct.decoder.num_nextn_predict_layers = 0;
  direct.decoder.mtp_loss_weight = 0.3;
  for (const DeepseekV3Config& config : {changed, direct, deepseek()}) {
    const std::string text = config_json(config);
    EXPECT_TRUE(parse_model_config(text, "c.json") == ModelConfig(config)) << text;
  }
}

TEST(DeepseekV3Config, HasThePackagesDefaults) {
  const DeepseekV3Config config = parsed("");
  EXPECT_EQ(config.decoder.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.decoder.max_position_embeddings, 4096);
  EXPECT_EQ(config.decoder.num_key_value_heads, 2);
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(parsed(R"(, "q_lora_rank": null)").q_lora_rank, 0);
  EXPECT_EQ(head_dim_of(config.decoder), 64);
  EXPECT_EQ(query_head_dim_of(config), 192);
  EXPECT_FALSE(has_experts(config, 2));
  EXPECT_TRUE(has_experts(config, 3));
}

struct BadField {
  const char* fields;
  const char* says;
};

// Such a model can be planned; training it says why not.
TEST(DeepseekV3Config, RemembersWhatIsNotComputed) {
  const std::vector<BadField> table = {
      {R"(, "scoring_func": "softmax")",
       "c.json: scoring_func is \"softmax\"; only \"sigmoid\" is computed"},
      {R"(, "topk_method": "greedy")",
       "c.json: topk_method is \"greedy\"; only \"noaux_tc\" is computed"},
      {R"(, "quantization_config": {"quant_method": "fp8"})", "; weights with scales are not read"},
  };
  for (const BadField& bad : table) {
    const ModelConfig config = parsed(bad.fields);
    EXPECT_NO_THROW(build_model("m", config));
    EXPECT_THAT(refusal([&] { check_trainable(config); }), HasSubstr(bad.says));
  }
}

TEST(DeepseekV3Config, RefusesWhatCannotBe) {
  const auto refused = [](const auto& change) {
    DeepseekV3Config config = deepseek();
    change(config);
    return refusal([&] { check_trainable(config); });
  };
  EXPECT_EQ(refused([](DeepseekV3Config&) {}), "accepted");
  EXPECT_THAT(refused([](DeepseekV3Config& c) { c.decoder.num_key_value_heads = 2; }),
              HasSubstr("num_key_value_heads is 2; with latent attention (model_type deepseek_v3) "
                        "it must be num_attention_heads = 6"));
  EXPECT_THAT(refused([](DeepseekV3Config& c) { c.decoder.sliding_window = 2; }),
              HasSubstr("sliding_window is above 0"));
  EXPECT_THAT(refused([](DeepseekV3Config& c) { c.kv_lora_rank = 0; }),
              HasSubstr("kv_lora_rank is 0; it must be a whole number from 1"));
  EXPECT_THAT(refused([](DeepseekV3Config& c) { c.first_k_dense_replace = 4; }),
              "first_k_dense_replace is 4; it must be a whole number from 0 to 3");
  EXPECT_THAT(refused([](DeepseekV3Config& c) { c.n_group = 3; }),
              "n_group is 3; it must divide n_routed_experts = 8");
  EXPECT_THAT(refused([](DeepseekV3Config& c) { c.topk_group = 5; }),
              "topk_group is 5; it must be a whole number from 1 to 4");
  EXPECT_THAT(refusal([] { parsed(R"(, "moe_layer_freq": 2)"); }),
              HasSubstr("c.json: moe_layer_freq is 2; only 1 is supported"));
  EXPECT_THAT(refusal([] { parsed(R"(, "qk_rope_head_dim": 0)"); }),
              HasSubstr("c.json: qk_rope_head_dim is 0; it must be at least 1"));
}

TEST(DeepseekV3Config, SharesHeadsAndDenseLayersOutAmongRanks) {
  const auto refused = [](const DeepseekV3Config& config, int64_t tp) {
    return refusal([&] { check_tensor_ranks(config, tp); });
  };
  EXPECT_THAT(refused(deepseek(), 4), HasSubstr("num_attention_heads is 6, which tp = 4 ranks"));
  EXPECT_THAT(refused(deepseek(), 2), HasSubstr("intermediate_size is 77, which tp = 2 ranks"));
  DeepseekV3Config without_dense = deepseek();
  without_dense.first_k_dense_replace = 0;
  EXPECT_EQ(refused(without_dense, 2), "accepted");
}

TEST(DeepseekV3Config, TellsResultsFromTensors) {
  DeepseekV3Config other = deepseek();
  other.rope_interleave = false;
  other.routed_scaling_factor = 1.0;
  EXPECT_EQ(differing_fields(deepseek(), other, ModelAspect::kTensors).size(), 0U);
  EXPECT_EQ(differing_fields(deepseek(), other, ModelAspect::kResults).size(), 2U);
  other.kv_lora_rank = 17;
  EXPECT_EQ(differing_fields(deepseek(), other, ModelAspect::kTensors).size(), 1U);
}

// Six per weight that is multiplied; attention counted by hand.
TEST(DeepseekV3Config, CostsSixPerMultipliedWeightAndAttention) {
  DeepseekV3Config direct = deepseek();
  direct.q_lora_rank = 0;
  DeepseekV3Config predicting = deepseek();
  predicting.decoder.num_nextn_predict_layers = 1;
  for (const DeepseekV3Config& config : {deepseek(), direct, predicting}) {
    const int64_t further = config.decoder.num_nextn_predict_layers;
    const int64_t layers = 3 + further;
    const int64_t norms = layers * (2 * 48 + config.q_lora_rank + 16) + 48 + further * 3 * 48;
    // Five of eight experts are not chosen; the head is multiplied once more for a further token.
    const int64_t idle = (layers - 1) * 5 * 3 * 14 * 48;
    const int64_t weights =
        build_model("m", config).parameters() - norms - 100 * 48 - idle + further * 100 * 48;
    const double attention = static_cast<double>(layers * 6 * (20 + 10)) * 64.0 / 2.0;
    EXPECT_EQ(flops_per_token(config, 63), 6.0 * (static_cast<double>(weights) + attention));
  }
}

}  // namespace
}  // namespace fsdp::deepseek_v3_config_test
