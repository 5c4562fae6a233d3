// nn/: configurations of models that cannot be, that cannot be computed, or not by so many ranks.
#include "fsdp/nn/config/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::model_config_test {
namespace {

using testing::deepseek;
using ::testing::HasSubstr;
using testing::hybrid;
using testing::llama;
using testing::qwen3_next;
using testing::refusal;

NemotronHConfig expert_hybrid() {
  NemotronHConfig config = hybrid();
  config.hybrid_override_pattern = "ME";
  config.n_routed_experts = 8;
  config.moe_intermediate_size = 4;
  return config;
}

// The configuration with other fields in its file; null takes one out.
ModelConfig with(const ModelConfig& config, const std::string& fields) {
  nlohmann::json json = nlohmann::json::parse(config_json(config));
  json.merge_patch(nlohmann::json::parse(fields));
  return parse_model_config(json.dump(), "c.json");
}

struct Refused {
  ModelConfig config;
  const char* fields;
  const char* says;
};

TEST(Architecture, RefusesWhatCannotBeOrCannotBeComputed) {
  const MixtralConfig experts{llama(), 4};
  MixtralConfig qwen{llama(), 4};
  qwen.decoder.qk_norm = true;
  for (const auto& [config, fields, says] : std::vector<Refused>{
           {llama(), R"({"head_dim": 7})", "head_dim is 7; rotary positions need an even one"},
           {llama(), R"({"rms_norm_eps": 0})", "rms_norm_eps is 0; it must be a number above 0"},
           {llama(), R"({"rope_theta": -1})", "rope_theta is -1"},
           {llama(), R"({"max_position_embeddings": 0})", "max_position_embeddings is 0; it must"},
           {llama(), R"({"num_nextn_predict_layers": -1})", "num_nextn_predict_layers is -1"},
           {llama(), R"({"num_nextn_predict_layers": 4094})",
            "is 4094; it must be a whole number "
            "from 0 to 4093"},
           {llama(), R"({"num_hidden_layers": 20000})",
            "num_hidden_layers is 20000; it must be a whole number from 1 to 4096"},
           {llama(), R"({"head_dim": null, "hidden_size": 49})",
            "hidden_size is 49, which num_attention_heads = 6 does not divide"},
           {llama(), R"({"num_key_value_heads": 4})",
            "num_key_value_heads is 4; it must divide num_attention_heads = 6"},
           {llama(), R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                         "high_freq_factor": 1, "original_max_position_embeddings": 64}})",
            "rope_scaling.high_freq_factor is 1; it must be above low_freq_factor = 4"},
           {llama(), R"({"hidden_size": 16777216, "intermediate_size": 16777216,
                         "vocab_size": 16777216, "head_dim": 16777216,
                         "num_attention_heads": 16777216, "num_key_value_heads": 16777216})",
            "parameters; check its shapes"},
           {experts, R"({"num_experts_per_tok": 5})", "it must be a whole number from 1 to 4"},
           {experts, R"({"num_local_experts": 0})", "num_local_experts is 0"},
           {qwen, R"({"num_experts": 0})", "num_local_experts is 0"},
           {experts, R"({"num_local_experts": 131072})",
            "num_local_experts is 131072 in 3 layers; at most 131072 experts in all"},
           {hybrid(), R"({"n_groups": 3})", "n_groups is 3; it must divide mamba_num_heads = 4"},
           {hybrid(), R"({"chunk_size": 0})", "chunk_size is 0"},
           {hybrid(), R"({"hybrid_override_pattern": "M\u001b", "num_hidden_layers": null})",
            "hybrid_override_pattern contains '\\x1b'; the known layers are"},
           {hybrid(), R"({"num_nextn_predict_layers": 2047, "mtp_hybrid_override_pattern": "**"})",
            "4098 in all; at most 4096 are supported"},
           {expert_hybrid(), R"({"n_routed_experts": 0})", "n_routed_experts is 0; it must be"},
           {expert_hybrid(), R"({"n_group": 3})",
            "n_group is 3; it must divide n_routed_experts = 8"},
           {expert_hybrid(), R"({"n_group": 4, "num_experts_per_tok": 3})",
            "num_experts_per_tok is 3; it must be a whole number from 1 to 2"},
           {expert_hybrid(),
            R"({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M"})",
            "mtp_hybrid_override_pattern contains 'M'"},
           {qwen3_next(), R"({"linear_num_key_heads": 3})",
            "linear_num_key_heads is 3; it must divide linear_num_value_heads = 4"},
           {qwen3_next(), R"({"layer_types": ["full_attention"]})",
            "layer_types has 1 entries; it needs one for each of"},
           {qwen3_next(), R"({"mlp_only_layers": [3]})",
            "mlp_only_layers is 3; it must be a whole number from 0 to 2"},
           {qwen3_next(), R"({"partial_rotary_factor": 0.2})",
            "partial_rotary_factor is 0.2; times head_dim = 8 it must be an even"},
           {qwen3_next(), R"({"num_experts_per_tok": 6})", "num_experts_per_tok is 6"},
           {deepseek(), R"({"num_key_value_heads": 2})",
            "num_key_value_heads is 2; with latent attention (model_type deepseek_v3) it must be "
            "num_attention_heads = 6"},
           {deepseek(), R"({"kv_lora_rank": 0})", "kv_lora_rank is 0; it must be a whole number"},
           {deepseek(), R"({"first_k_dense_replace": 4})",
            "first_k_dense_replace is 4; it must be a whole number from 0 to 3"},
           {deepseek(), R"({"topk_group": 5})",
            "topk_group is 5; it must be a whole number from 1 to 4"}}) {
    const auto use = [](const ModelConfig& each) {
      check_trainable(each);
      build_model("m", each);
    };
    EXPECT_EQ(refusal([&, whole = config] { use(whole); }), "accepted");
    EXPECT_THAT(refusal([&, whole = config, text = fields] { use(with(whole, text)); }),
                HasSubstr(says));
  }
  for (const char* field : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                            "num_key_value_heads", "intermediate_size"})
    for (const int64_t value : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN})
      EXPECT_THAT(refusal([&] {
                    build_model("m", with(llama(), concat("{\"", field, "\": ", value, "}")));
                  }),
                  HasSubstr(concat(field, " is ", value, "; it must be a ")));
  NemotronHConfig deep = hybrid();
  deep.hybrid_override_pattern = std::string(4097, 'M');
  EXPECT_EQ(refusal([&] { check_trainable(deep); }),
            "hybrid_override_pattern has 4097 layers; at most 4096 are supported");
}

TEST(Architecture, RefusesRanksThatCannotComputeItTogether) {
  const auto refused = [](const ModelConfig& config, int64_t tp) {
    return refusal([&] { check_tensor_ranks(config, tp); });
  };
  LlamaConfig even = llama();
  even.intermediate_size = 78;
  NemotronHConfig even_hybrid = hybrid();
  even_hybrid.intermediate_size = 78;
  NemotronHConfig one_group = even_hybrid;
  one_group.n_groups = 1;
  NemotronHConfig without_mamba = one_group;
  without_mamba.hybrid_override_pattern = "*-";
  EXPECT_EQ(refused(even, 2), "accepted");
  EXPECT_EQ(refused(MixtralConfig{llama(), 4}, 2), "accepted");  // experts are not cut
  EXPECT_EQ(refused(hybrid(), 1), "accepted");
  EXPECT_THAT(refused(even, 4), HasSubstr("num_attention_heads is 6, which tp = 4 ranks cannot"));
  EXPECT_THAT(refused(even, 6), HasSubstr("num_key_value_heads is 2, which tp = 6 ranks cannot"));
  EXPECT_THAT(refused(llama(), 2), HasSubstr("intermediate_size is 77, which tp = 2 ranks cannot"));
  EXPECT_EQ(refused(even_hybrid, 2), "accepted");
  EXPECT_EQ(refused(without_mamba, 2), "accepted");  // only sizes that layers have
  EXPECT_THAT(refused(one_group, 2), HasSubstr("n_groups is 1, which tp = 2 ranks cannot"));
  EXPECT_THAT(refused(hybrid(), 2), HasSubstr("intermediate_size is 77, which tp = 2 ranks"));
  Qwen3NextConfig next = qwen3_next();
  EXPECT_EQ(refused(next, 2), "accepted");
  next.mlp_only_layers = {1};
  EXPECT_THAT(refused(next, 2), HasSubstr("intermediate_size is 77, which tp = 2 ranks cannot"));
  next.linear_num_key_heads = 1;
  EXPECT_THAT(refused(next, 2), HasSubstr("linear_num_key_heads is 1, which tp = 2 ranks"));
  DeepseekV3Config without_dense = deepseek();
  without_dense.first_k_dense_replace = 0;
  EXPECT_THAT(refused(deepseek(), 4), HasSubstr("num_attention_heads is 6, which tp = 4 ranks"));
  EXPECT_THAT(refused(deepseek(), 2), HasSubstr("intermediate_size is 77, which tp = 2 ranks"));
  EXPECT_EQ(refused(without_dense, 2), "accepted");
}

TEST(Architecture, CountsNormsSharedExpertsAndPredictionLayers) {
  const auto parameters = [](const ModelConfig& config) {
    return build_model("m", config).parameters();
  };
  LlamaConfig changed = llama();
  changed.qk_norm = true;
  EXPECT_EQ(parameters(changed) - parameters(llama()), 3 * 2 * 8);
  changed = llama();
  changed.num_nextn_predict_layers = 1;
  const ModelShape predicting = build_model("m", changed);
  const int64_t block = predicting.units[1].numel();
  EXPECT_EQ(predicting.parameters() - parameters(llama()), block + 3 * 48 + 2 * 48 * 48);
  // Embedding, three layers and head; then the embedding, the prediction layer and the head.
  EXPECT_THAT(predicting.uses, ::testing::ElementsAre(0, 1, 2, 3, 4, 0, 5, 4));
  EXPECT_EQ(
      parameters(MixtralConfig{llama(), 4, 2, 0.0, 10}) - parameters(MixtralConfig{llama(), 4}),
      3 * 3 * 10 * 48);
}

}  // namespace
}  // namespace fsdp::model_config_test
