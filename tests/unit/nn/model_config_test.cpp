// nn/: configurations of models that cannot be, that cannot be computed, or not by so many ranks.
#include "fsdp/nn/config/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "fsdp/base/text.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::model_config_test {
namespace {

using ::testing::HasSubstr;
using testing::hybrid;
using testing::llama;
using testing::refusal;

TEST(Architecture, RefusesWhatCannotBeComputed) {
  const auto refused = [](auto config, const auto& change) {
    change(config);
    return refusal([&] { check_trainable(config); });
  };
  EXPECT_EQ(refused(llama(), [](LlamaConfig&) {}), "accepted");
  EXPECT_THAT(refused(llama(), [](LlamaConfig& c) { c.head_dim = 7; }),
              HasSubstr("head_dim is 7; rotary positions need an even one"));
  EXPECT_THAT(refused(llama(), [](LlamaConfig& c) { c.rms_norm_eps = 0.0; }),
              HasSubstr("rms_norm_eps is 0; it must be a number above 0"));
  EXPECT_THAT(refused(llama(), [](LlamaConfig& c) { c.rope_theta = -1.0; }),
              HasSubstr("rope_theta is -1"));
  EXPECT_THAT(refused(llama(), [](LlamaConfig& c) { c.num_nextn_predict_layers = -1; }),
              HasSubstr("num_nextn_predict_layers is -1"));
  EXPECT_THAT(
      refused(llama(),
              [](LlamaConfig& c) {
                c.rope_scaling = Llama3RopeScaling{8.0, 4.0, 1.0};
              }),
      HasSubstr("rope_scaling.high_freq_factor is 1; it must be above low_freq_factor = 4"));
  const auto refused_experts = [&](const auto& change) {
    return refused(hybrid(), [&](NemotronHConfig& c) {
      c.hybrid_override_pattern = "ME";
      c.n_routed_experts = 8;
      c.moe_intermediate_size = 4;
      change(c);
    });
  };
  EXPECT_EQ(refused_experts([](NemotronHConfig&) {}), "accepted");
  EXPECT_THAT(refused_experts([](NemotronHConfig& c) { c.n_routed_experts = 0; }),
              HasSubstr("n_routed_experts is 0; it must be"));
  EXPECT_THAT(refused_experts([](NemotronHConfig& c) { c.n_group = 3; }),
              "n_group is 3; it must divide n_routed_experts = 8");
  EXPECT_THAT(refused_experts([](NemotronHConfig& c) {
                c.n_group = 4;
                c.num_experts_per_tok = 3;
              }),
              "num_experts_per_tok is 3; it must be a whole number from 1 to 2");
  EXPECT_THAT(refused_experts([](NemotronHConfig& c) {
                c.num_nextn_predict_layers = 1;
                c.mtp_hybrid_override_pattern = "M";
              }),
              HasSubstr("mtp_hybrid_override_pattern contains 'M'"));
  EXPECT_THAT(
      refused(MixtralConfig{llama(), 4}, [](MixtralConfig& c) { c.num_experts_per_tok = 5; }),
      HasSubstr("num_experts_per_tok is 5; it must be a whole number from 1 to 4"));
  EXPECT_THAT(refused(hybrid(), [](NemotronHConfig& c) { c.n_groups = 3; }),
              HasSubstr("n_groups is 3; it must divide mamba_num_heads = 4"));
  EXPECT_THAT(refused(hybrid(), [](NemotronHConfig& c) { c.chunk_size = 0; }),
              HasSubstr("chunk_size is 0"));
}

// Each by a sentence, before anything is made of it.
TEST(Architecture, RefusesSizesThatNoModelHas) {
  const auto refused = [](auto config, const auto& change) {
    change(config);
    return refusal([&] { build_model("m", ModelConfig(config)); });
  };
  const auto llama_with = [&](int64_t LlamaConfig::*field, int64_t value) {
    return refused(llama(), [&](LlamaConfig& c) { c.*field = value; });
  };
  EXPECT_EQ(llama_with(&LlamaConfig::num_hidden_layers, 4096), "accepted");
  EXPECT_EQ(llama_with(&LlamaConfig::num_hidden_layers, 20000),
            "num_hidden_layers is 20000; it must be a whole number from 1 to 4096");
  EXPECT_EQ(llama_with(&LlamaConfig::num_nextn_predict_layers, 4094),
            "num_nextn_predict_layers is 4094; it must be a whole number from 0 to 4093");
  for (const auto field : {&LlamaConfig::vocab_size, &LlamaConfig::hidden_size,
                           &LlamaConfig::num_hidden_layers, &LlamaConfig::num_attention_heads,
                           &LlamaConfig::num_key_value_heads, &LlamaConfig::intermediate_size})
    for (const int64_t value : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN})
      EXPECT_THAT(llama_with(field, value), HasSubstr(concat(" is ", value, "; it must be a ")));
  EXPECT_THAT(llama_with(&LlamaConfig::num_key_value_heads, 4),
              HasSubstr("num_key_value_heads is 4; it must divide num_attention_heads = 6"));
  EXPECT_THAT(refused(llama(),
                      [](LlamaConfig& c) {
                        c.hidden_size = c.intermediate_size = c.vocab_size = 1 << 24;
                        c.head_dim = 1 << 24;
                        c.num_attention_heads = c.num_key_value_heads = 1 << 24;
                      }),
              HasSubstr("parameters; check its shapes"));
  EXPECT_THAT(refused(MixtralConfig{llama(), 1 << 17}, [](MixtralConfig&) {}),
              HasSubstr("num_local_experts is 131072 in 3 layers; at most 131072 experts in all"));
  EXPECT_THAT(
      refused(hybrid(),
              [](NemotronHConfig& c) { c.hybrid_override_pattern = std::string(4097, 'M'); }),
      "hybrid_override_pattern has 4097 layers; at most 4096 are supported");
  EXPECT_THAT(refused(hybrid(),
                      [](NemotronHConfig& c) {
                        c.num_nextn_predict_layers = 2047;
                        c.mtp_hybrid_override_pattern = "**";
                      }),
              HasSubstr("4098 in all; at most 4096 are supported"));
  EXPECT_THAT(refused(hybrid(), [](NemotronHConfig& c) { c.hybrid_override_pattern = "M\x1b"; }),
              HasSubstr("hybrid_override_pattern contains '\\x1b'; the known layers are"));
  LlamaConfig no_positions = llama();
  no_positions.max_position_embeddings = 0;
  EXPECT_THAT(refusal([&] { check_trainable(no_positions); }),
              HasSubstr("max_position_embeddings is 0; it must be"));
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
