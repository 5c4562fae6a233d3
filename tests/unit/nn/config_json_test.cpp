// nn/: configurations from and to config.json, presets, and what each wrong field is answered with.
#include "fsdp/nn/config/config_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/config/config_differences.h"
#include "fsdp/nn/config/flops.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::config_json_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::hybrid;
using testing::llama;
using testing::refusal;
using ::testing::StartsWith;

// No field at its default, so that one that is not written or not read shows.
TEST(ConfigJson, BringsEveryFieldBack) {
  LlamaConfig dense = llama();
  dense.attention_bias = dense.mlp_bias = dense.tie_word_embeddings = true;
  dense.rms_norm_eps = 1e-4;
  dense.rope_theta = 500000.0;
  dense.rope_scaling = Llama3RopeScaling{16.0, 2.0, 5.0, 4096};
  dense.max_position_embeddings = 1234;
  dense.initializer_range = 0.1;
  dense.num_nextn_predict_layers = 2;
  dense.mtp_loss_weight = 0.25;
  LlamaConfig normed = dense;
  normed.qk_norm = true;
  normed.mlp_bias = false;
  LlamaConfig windowed = dense;
  windowed.attention_bias = windowed.mlp_bias = false;
  windowed.family = LlamaFamily::kMistral;
  windowed.sliding_window = 21;
  windowed.rope_scaling = YarnRopeScaling{4.0, 1024, 31.0, 2.0, 0.5, 0.75, 1.5};
  LlamaConfig without_window = windowed;
  without_window.sliding_window = 0;
  LlamaConfig qwen2 = without_window;
  qwen2.family = LlamaFamily::kQwen2;
  qwen2.rope_scaling = YarnRopeScaling{4.0, 1024};
  MixtralConfig experts{dense, 8, 3, 0.5, 40};
  experts.decoder.attention_bias = experts.decoder.mlp_bias = false;
  experts.decoder.sliding_window = 22;
  MixtralConfig normed_experts{normed, 8, 3, 0.5, 0, false};
  NemotronHConfig mixed = hybrid();
  mixed.use_conv_bias = false;
  mixed.use_bias = mixed.attention_bias = mixed.mlp_bias = mixed.tie_word_embeddings = true;
  mixed.layer_norm_epsilon = 1e-4;
  mixed.chunk_size = 32;
  mixed.time_step_min = 0.01;
  mixed.max_position_embeddings = 1234;
  mixed.initializer_range = 0.1;
  NemotronHConfig mixed_experts = mixed;
  mixed_experts.hybrid_override_pattern = "ME*-";
  mixed_experts.n_routed_experts = 12;
  mixed_experts.num_experts_per_tok = 3;
  mixed_experts.moe_intermediate_size = 14;
  mixed_experts.moe_shared_expert_intermediate_size = 15;
  mixed_experts.moe_latent_size = 16;
  mixed_experts.n_group = 4;
  mixed_experts.topk_group = 2;
  mixed_experts.norm_topk_prob = false;
  mixed_experts.routed_scaling_factor = 2.5;
  mixed_experts.router_bias_update_rate = 0.25;
  mixed_experts.router_aux_loss_coef = 0.125;
  mixed_experts.num_nextn_predict_layers = 2;
  mixed_experts.mtp_hybrid_override_pattern = "-E";
  mixed_experts.mtp_loss_weight = 0.5;
  for (const ModelConfig& config :
       {ModelConfig(dense), ModelConfig(normed), ModelConfig(windowed), ModelConfig(without_window),
        ModelConfig(qwen2), ModelConfig(experts), ModelConfig(normed_experts), ModelConfig(mixed),
        ModelConfig(mixed_experts), ModelConfig(llama()), ModelConfig(hybrid()),
        ModelConfig(MixtralConfig{llama(), 4})}) {
    const std::string text = config_json(config);
    EXPECT_TRUE(parse_model_config(text, "c.json") == config) << text;
  }
}

// As version 5 of the package writes them, and as earlier ones did.
TEST(ConfigJson, ReadsBothFormsOfRotaryPositions) {
  const std::string common =
      R"({"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 8, )";
  const std::string scaling =
      R"("factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 4096)";
  const auto rope_of = [&](const std::string& fields) {
    const auto config = std::get<LlamaConfig>(parse_model_config(common + fields + "}", "c"));
    return std::pair(config.rope_theta, config.rope_scaling);
  };
  const Llama3RopeScaling expected{16.0, 1.0, 4.0, 4096};
  const auto scaled = std::pair(500000.0, RopeScaling(expected));
  EXPECT_EQ(rope_of(R"("rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", )" +
                    scaling + "}"),
            scaled);
  EXPECT_EQ(rope_of(R"("rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", )" +
                    scaling + "}"),
            scaled);
  const auto plain = std::pair(7.0, RopeScaling());
  EXPECT_EQ(rope_of(R"("rope_parameters": {"rope_theta": 7, "rope_type": "default"})"), plain);
  EXPECT_EQ(rope_of(R"("rope_theta": 7, "rope_scaling": null)"), plain);
  const auto yarn = std::pair(7.0, RopeScaling(YarnRopeScaling{40.0, 4096, 32.0, 1.0, 1.0, 1.0}));
  EXPECT_EQ(rope_of(R"("rope_theta": 7, "rope_scaling": {"type": "yarn", "factor": 40,
                       "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                       "mscale": 1.0, "mscale_all_dim": 1.0})"),
            yarn);
}

TEST(ConfigJson, ReadsLayersAsAList) {
  std::string text = config_json(hybrid());
  const size_t at = text.find("\"hybrid_override_pattern\": \"M-*M\"");
  ASSERT_NE(at, std::string::npos);
  text.replace(at, 33, R"("layers_block_type": ["linear_attention", "mlp", "attention", "mamba"])");
  EXPECT_TRUE(parse_model_config(text, "c.json") == ModelConfig(hybrid())) << text;
}

TEST(ConfigJson, HasThePackagesDefaults) {
  const std::string sizes =
      R"("vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 8, "num_local_experts": 4})";
  const auto of = [&](const std::string& type) {
    return parse_model_config(R"({"model_type": ")" + type + "\", " + sizes, "c");
  };
  const auto dense = std::get<LlamaConfig>(of("llama"));
  EXPECT_EQ(dense.rms_norm_eps, 1e-6);
  EXPECT_EQ(dense.rope_theta, 10000.0);
  EXPECT_FALSE(dense.qk_norm);
  const auto qwen = std::get<LlamaConfig>(of("qwen3"));
  EXPECT_EQ(qwen.head_dim, 128);
  EXPECT_TRUE(qwen.qk_norm);
  const auto mistral = std::get<LlamaConfig>(of("mistral"));
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_EQ(mistral.max_position_embeddings, 131072);
  EXPECT_FALSE(has_qkv_bias(mistral));
  const auto qwen2 = std::get<LlamaConfig>(of("qwen2"));
  EXPECT_EQ(qwen2.sliding_window, 0);
  EXPECT_TRUE(has_qkv_bias(qwen2) && !qwen2.attention_bias);
  const auto experts = std::get<MixtralConfig>(of("mixtral"));
  EXPECT_EQ(experts.decoder.rms_norm_eps, 1e-5);
  EXPECT_EQ(experts.decoder.rope_theta, 1e6);
  EXPECT_EQ(experts.num_experts_per_tok, 2);
  EXPECT_EQ(experts.router_aux_loss_coef, 0.001);
}

struct BadField {
  const char* fields;
  const char* says;
};

TEST(ConfigJson, NamesFileFieldValueAndFix) {
  const std::vector<BadField> table = {
      {R"("rms_norm_eps": "small")", "rms_norm_eps is \"small\"; it must be a number"},
      {R"("rope_theta": [])", "rope_theta is []; it must be a number"},
      {R"("rope_scaling": 3)", "rope_scaling is 3; it must be an object"},
      {R"("rope_parameters": {"rope_type": 7})",
       "rope_parameters.rope_type is 7; it must be a str"},
      {R"("rope_scaling": {"rope_type": "llama3", "factor": "x", "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": 8192})",
       "rope_scaling.factor is \"x\"; it must be a number"},
      {R"("rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4,
           "original_max_position_embeddings": 8192})",
       "rope_scaling.factor is missing; \"llama3\" scaling needs it"},
      {R"("rope_parameters": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4,
           "original_max_position_embeddings": 8192})",
       "rope_parameters.low_freq_factor is missing"},
      {R"("rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1,
           "original_max_position_embeddings": 8192})",
       "rope_scaling.high_freq_factor is missing"},
      {R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": null})",
       "rope_scaling.original_max_position_embeddings is null; \"llama3\" scaling needs it"},
      {R"("rope_scaling": {"rope_type": "yarn", "factor": 4})",
       "rope_scaling.original_max_position_embeddings is missing; \"yarn\" scaling needs it"},
      {R"("head_dim": 0)", "head_dim is 0; it must be at least 1; leave it out for hidden_size / "},
      {R"("head_dim": -8)", "head_dim is -8; it must be at least 1"},
      {R"("rms_norm_eps": 1e999)", "not valid JSON"},
      {R"("rope_theta": NaN)", "not valid JSON"},
      {R"("max_position_embeddings": 99999999999999999999)",
       "max_position_embeddings is 1e+20; it must be a whole number"},
      {R"("num_nextn_predict_layers": 1.5)", "num_nextn_predict_layers is 1.5; it must be a whole"},
      {R"("hidden_act": 1)", "hidden_act is 1; it must be a string"},
  };
  for (const BadField& bad : table) {
    const std::string text =
        std::string(R"({"model_type": "llama", "vocab_size": 8, "hidden_size": 8,
          "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, )") +
        bad.fields + "}";
    EXPECT_THAT(refusal([&] { parse_model_config(text, "c.json"); }),
                AllOf(StartsWith("c.json: "), HasSubstr(bad.says)));
  }
  std::string mixed = config_json(hybrid());
  mixed.replace(mixed.find("\"head_dim\": 8"), 13, R"("attention_head_dim": 0)");
  EXPECT_THAT(refusal([&] { parse_model_config(mixed, "c.json"); }),
              StartsWith("c.json: attention_head_dim is 0; it must be at least 1"));
  std::string windowed = R"({"model_type": "mistral", "vocab_size": 8, "hidden_size": 8,
      "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
      "sliding_window": 0})";
  EXPECT_THAT(
      refusal([&] { parse_model_config(windowed, "c.json"); }),
      StartsWith("c.json: sliding_window is 0; it must be at least 1, or null for no window"));
  EXPECT_THAT(refusal([&] { parse_model_config(R"({"model_type": "bert"})", "c.json"); }),
              HasSubstr("c.json: model_type is \"bert\"; known are deepseek_v3, llama, mistral, "
                        "mixtral, nemotron_h, "));
}

// Such a model can be planned; training it says why not.
TEST(ConfigJson, RemembersWhatIsNotComputed) {
  const std::vector<BadField> table = {
      {R"("hidden_act": "gelu")", "c.json: hidden_act is \"gelu\"; only \"silu\" is computed"},
      {R"("attention_dropout": 0.1)", "c.json: attention_dropout is 0.1; only 0 is computed"},
      {R"("rope_scaling": {"type": "longrope", "factor": 2})",
       "c.json: rope_scaling.type is \"longrope\"; only \"default\", \"llama3\" and \"yarn\" are"},
      {R"("rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": false,
                           "original_max_position_embeddings": 64})",
       "c.json: rope_scaling.truncate is false; only true is computed"},
      {R"("rope_parameters": {"rope_type": "linear", "factor": 2})",
       "c.json: rope_parameters.rope_type is \"linear\"; only"},
      {R"("rope_parameters": {"partial_rotary_factor": 0.5})",
       "c.json: rope_parameters.partial_rotary_factor is 0.5; only 1 is computed"},
  };
  for (const BadField& bad : table) {
    const std::string text =
        std::string(R"({"model_type": "llama", "vocab_size": 8, "hidden_size": 8,
          "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, )") +
        bad.fields + "}";
    const ModelConfig config = parse_model_config(text, "c.json");
    EXPECT_NO_THROW(build_model("m", config));
    EXPECT_THAT(refusal([&] { check_trainable(config); }), HasSubstr(bad.says));
  }
  const ModelConfig windowed = parse_model_config(
      R"({"model_type": "qwen2", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
          "num_attention_heads": 2, "intermediate_size": 8, "use_sliding_window": true})",
      "c.json");
  EXPECT_THAT(refusal([&] { check_trainable(windowed); }),
              HasSubstr("c.json: use_sliding_window is true; only false is computed"));
}

// Each model_type has a class of the package, which has some options and not others.
TEST(ConfigJson, RefusesToWriteWhatAClassDoesNotHave) {
  const auto refused = [](const auto& change) {
    LlamaConfig config = llama();
    change(config);
    return refusal([&] { config_json(config); });
  };
  EXPECT_THAT(refused([](LlamaConfig& c) { c.sliding_window = 4; }),
              "sliding_window is 4; with model_type llama only 0, none, is possible");
  EXPECT_THAT(refused([](LlamaConfig& c) {
                c.sliding_window = 4;
                c.family = LlamaFamily::kQwen2;
              }),
              HasSubstr("with model_type qwen2 only 0"));
  EXPECT_THAT(refused([](LlamaConfig& c) {
                c.attention_bias = true;
                c.family = LlamaFamily::kMistral;
              }),
              HasSubstr("with model_type mistral none of them is possible"));
}

std::string differences(const ModelConfig& before, const ModelConfig& now, ModelAspect aspect) {
  std::string text;
  for (const FieldDifference& each : differing_fields(before, now, aspect))
    text += concat(each.field, " ", each.before, " ", each.now, "; ");
  return text;
}

TEST(DifferingFields, NamesEachWithBothValues) {
  LlamaConfig other = llama();
  other.vocab_size = 200;
  other.num_nextn_predict_layers = 1;
  EXPECT_EQ(differences(llama(), llama(), ModelAspect::kResults), "");
  EXPECT_EQ(differences(llama(), other, ModelAspect::kResults),
            "vocab_size 100 200; num_nextn_predict_layers none 1; ");
  EXPECT_EQ(differences(other, hybrid(), ModelAspect::kResults),
            "model_type \"llama\" \"nemotron_h\"; ");
}

TEST(DifferingFields, LeavesOutWhatTensorsOrResultsDoNotDependOn) {
  LlamaConfig longer = llama();
  longer.max_position_embeddings *= 2;
  longer.initializer_range *= 2;
  EXPECT_EQ(differences(llama(), longer, ModelAspect::kResults), "");
  longer.rope_theta = 500;
  EXPECT_EQ(differences(llama(), longer, ModelAspect::kResults), "rope_theta 10000.0 500.0; ");
  EXPECT_EQ(differences(llama(), longer, ModelAspect::kTensors), "");

  NemotronHConfig experts = hybrid();
  experts.hybrid_override_pattern = "ME";
  experts.n_routed_experts = 8;
  experts.moe_intermediate_size = 4;
  NemotronHConfig slower = experts;
  slower.router_bias_update_rate = 0.0;
  EXPECT_EQ(differences(experts, slower, ModelAspect::kResults), "");
  slower.n_group = slower.topk_group = 2;
  slower.routed_scaling_factor = 2.5;
  EXPECT_EQ(differences(experts, slower, ModelAspect::kResults),
            "n_group 1 2; topk_group 1 2; routed_scaling_factor 1.0 2.5; ");
  EXPECT_EQ(differences(experts, slower, ModelAspect::kTensors), "");
}

TEST(ExpertNames, AreOfModelsWithExpertsAlone) {
  EXPECT_FALSE(expert_names(ModelConfig(llama())));
  EXPECT_FALSE(expert_names(ModelConfig(hybrid())));
  EXPECT_TRUE(expert_names(ModelConfig(MixtralConfig{llama(), 4})));
  NemotronHConfig predicting = hybrid();
  predicting.num_nextn_predict_layers = 1;  // with the pattern "*E"
  EXPECT_TRUE(expert_names(ModelConfig(predicting)));
}

// Six per weight that is multiplied; attention counted by hand.
TEST(Flops, AreSixPerMultipliedWeightAndAttention) {
  const auto weights_without_embedding = [](const ModelConfig& config, int64_t num_norms) {
    return static_cast<double>(build_model("m", config).parameters() - 100 * 48 - num_norms * 48);
  };
  const auto attention = [](int64_t layers, double sequence) {
    return static_cast<double>(layers) * 2.0 * 48.0 * (sequence + 1.0) / 2.0;
  };
  EXPECT_EQ(flops_per_token(llama(), 63),
            6 * (weights_without_embedding(llama(), 7) + attention(3, 63)));
  LlamaConfig windowed = llama();
  windowed.sliding_window = 4;  // seven positions see 1, 2, 3, 4, 4, 4 and 4
  EXPECT_DOUBLE_EQ(flops_per_token(windowed, 7),
                   6 * (weights_without_embedding(windowed, 7) + 3 * 2.0 * 48.0 * 22.0 / 7.0));
  LlamaConfig predicting = llama();
  predicting.num_nextn_predict_layers = 1;  // its head is the same matrix, multiplied again
  EXPECT_EQ(flops_per_token(predicting, 63),
            6 * (weights_without_embedding(predicting, 7 + 5) + 100 * 48 + attention(4, 63)));
  const MixtralConfig experts{llama(), 5, 2, 0.0, 10};
  const double idle = 3.0 * 3 * 3 * 77 * 48;  // three of five experts, three matrices, three layers
  EXPECT_EQ(flops_per_token(experts, 63),
            6 * (weights_without_embedding(experts, 7) - idle + attention(3, 63)));
  // Per Mamba layer no product has A_log, D, dt_bias, the norm and the biases of the convolution.
  const double unused = 2.0 * (3 * 4 + 32 + 96);
  const double scan = 2.0 * (63 * 2 * 16 + 63 * 32 + 2 * 32 * 16);
  EXPECT_EQ(flops_per_token(hybrid(), 63),
            6 * (weights_without_embedding(hybrid(), 5) - unused + scan + attention(1, 63)));
}

TEST(Presets, AreTrainablePlannedAndNamedOnce) {
  std::set<std::string> names;
  for (const ModelPreset& preset : model_presets()) {
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_NO_THROW(check_trainable(preset.config)) << preset.name;
    EXPECT_EQ(model_by_name(preset.name).name, preset.name);
    EXPECT_EQ(find_preset(preset.name), &preset);
    EXPECT_TRUE(parse_model_config(config_json(preset.config), "c").index() ==
                preset.config.index());
  }
  EXPECT_EQ(find_preset("huge"), nullptr);
  EXPECT_STREQ(model_presets().front().name, "tiny");
}

TEST(Presets, TinyOnesAre) {
  const ModelPreset* tiny = find_preset("tiny");
  EXPECT_EQ(vocab_size_of(tiny->config), 257);
  EXPECT_EQ(model_by_name("tiny").parameters(), 1'673'280);
  EXPECT_EQ(model_by_name("moe-tiny").parameters(), 2'921'856);
  EXPECT_EQ(model_by_name("hybrid-tiny").parameters(), 1'541'484);
  EXPECT_EQ(model_by_name("delta-tiny").parameters(), 1'667'128);
  EXPECT_EQ(model_by_name("mla-tiny").parameters(), 1'866'288);
}

}  // namespace
}  // namespace fsdp::config_json_test
