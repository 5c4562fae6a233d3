// nn/: configurations from and to config.json, presets, and what each wrong field is answered with.
#include "fsdp/nn/config/config_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/config/config_fields.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_tensors.h"
#include "support/config_examples.h"

namespace fsdp::config_json_test {
namespace {

using ::testing::AllOf;
using testing::deepseek;
using ::testing::HasSubstr;
using testing::hybrid;
using testing::llama;
using testing::qwen3_next;
using testing::refusal;
using ::testing::StartsWith;

// Changes one field: the `which`-th that is walked.
class FieldChanger final : public FieldWalk {
 public:
  explicit FieldChanger(int which) : left_(which) {}
  bool has_changed() const { return left_ < 0; }

  void integer(const Field&, int64_t& value, IntegerRange) override {
    if (left_-- == 0) value = 2 * value + 2;
  }
  void integer_or_null(const Field& field, int64_t& value) override { integer(field, value, {}); }
  void number(const Field&, double& value, NumberRule) override {
    if (left_-- == 0) value = 2.0 * value + 0.25;
  }
  void flag(const Field&, bool& value) override {
    if (left_-- == 0) value = !value;
  }
  void other(const Field&, const std::function<void(const JsonFields&)>&,
             const std::function<Json()>&) override {}
  void rope(LlamaConfig& c, bool) override {
    for (const RopeScaling& scaling :
         {RopeScaling(Llama3RopeScaling{16.0, 2.0, 5.0, 4096}),
          RopeScaling(YarnRopeScaling{4.0, 1024, 31.0, 2.0, 0.5, 0.75, 1.5})})
      if (left_-- == 0) c.rope_scaling = scaling;
    if (left_-- == 0) c.rope_theta = 500000.0;
  }

 private:
  int left_;
};

// Values that no file leaves out, so that one that is not written or not read shows.
TEST(ConfigJson, BringsEveryFieldBack) {
  LlamaConfig normed = llama();
  normed.qk_norm = true;
  LlamaConfig windowed = llama();
  windowed.family = LlamaFamily::kMistral;
  windowed.sliding_window = 21;
  LlamaConfig without_window = windowed;
  without_window.sliding_window = 0;
  LlamaConfig qwen2 = without_window;
  qwen2.family = LlamaFamily::kQwen2;
  MixtralConfig experts{windowed, 8, 3, 0.5, 40};
  experts.decoder.family = LlamaFamily::kLlama;
  NemotronHConfig predicting = testing::expert_hybrid();
  predicting.num_nextn_predict_layers = 2;
  predicting.mtp_hybrid_override_pattern = "-E";
  DeepseekV3Config direct = deepseek();
  direct.q_lora_rank = 0;
  Qwen3NextConfig dense = qwen3_next();
  dense.mlp_only_layers = {1, 2};
  dense.partial_rotary_factor = 0.5;
  int num_changes = 0;
  for (const ModelConfig& config :
       std::initializer_list<ModelConfig>{llama(), normed, windowed, without_window, qwen2, experts,
                                          MixtralConfig{normed, 8, 3, 0.5, 0, false}, hybrid(),
                                          predicting, deepseek(), direct, qwen3_next(), dense})
    for (int which = 0;; ++which) {
      ModelConfig changed = config;
      FieldChanger changer(which);
      walk_fields(changer, changed);
      const bool is_possible = refusal([&] { check_trainable(changed); }) == "accepted";
      num_changes += is_possible ? 1 : 0;
      if (is_possible) {
        const std::string text = config_json(changed);
        EXPECT_TRUE(parse_model_config(text, "c.json") == changed) << text;
      }
      if (!changer.has_changed()) break;
    }
  EXPECT_GT(num_changes, 200);
}

struct BadField {
  const char* fields;
  const char* says;
};

// A small file with these fields besides.
std::string small_file(const std::string& type, const std::string& fields) {
  return concat(R"({"model_type": ")", type, R"(", "vocab_size": 8, "hidden_size": 8,
      "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 8)",
                fields, "}");
}

// Version 5 of the package writes one of them, earlier ones wrote the other.
TEST(ConfigJson, ReadsBothFormsOfRotaryPositions) {
  const std::string scaling =
      R"("factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 4096)";
  const auto rope_of = [&](const std::string& fields) {
    const auto config =
        std::get<LlamaConfig>(parse_model_config(small_file("llama", ", " + fields), "c"));
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

DeepseekV3Config parsed_deepseek(const std::string& fields) {
  return std::get<DeepseekV3Config>(
      parse_model_config(small_file("deepseek_v3", fields), "c.json"));
}

TEST(ConfigJson, HasThePackagesDefaultsOfDeepSeek) {
  const DeepseekV3Config config = parsed_deepseek("");
  EXPECT_EQ(config.decoder.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.decoder.max_position_embeddings, 4096);
  EXPECT_EQ(config.decoder.num_key_value_heads, 2);
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(parsed_deepseek(R"(, "q_lora_rank": null)").q_lora_rank, 0);
  EXPECT_EQ(head_dim_of(config.decoder), 64);
  EXPECT_EQ(query_head_dim_of(config), 192);
  EXPECT_FALSE(has_experts(config, 2));
  EXPECT_TRUE(has_experts(config, 3));
}

Qwen3NextConfig parsed_next(const std::string& fields) {
  return std::get<Qwen3NextConfig>(parse_model_config(small_file("qwen3_next", fields), "c.json"));
}

// Positions of a part of the channels are in either of two fields.
TEST(ConfigJson, HasThePackagesDefaultsOfQwen3Next) {
  const Qwen3NextConfig config = parsed_next("");
  EXPECT_EQ(config.decoder.head_dim, 256);
  EXPECT_EQ(config.partial_rotary_factor, 0.25);
  EXPECT_EQ(config.num_experts, 512);
  for (const char* fields :
       {R"(, "partial_rotary_factor": 0.5)",
        R"(, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 7})"})
    EXPECT_EQ(parsed_next(fields).partial_rotary_factor, 0.5);
}

// A list, how often attention comes, or every fourth layer.
TEST(ConfigJson, ReadsWhichLayersAreAttention) {
  const auto layers_of = [](const std::string& fields) {
    const Qwen3NextConfig config = parsed_next(fields);
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

TEST(ConfigJson, NamesFileFieldValueAndFix) {
  const std::vector<BadField> table = {
      {R"("rms_norm_eps": "small")", "rms_norm_eps is \"small\"; it must be a number"},
      {R"("rope_scaling": 3)", "rope_scaling is 3; it must be an object"},
      {R"("rope_parameters": {"rope_type": 7})",
       "rope_parameters.rope_type is 7; it must be a str"},
      {R"("rope_scaling": {"rope_type": "llama3", "factor": "x", "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": 8192})",
       "rope_scaling.factor is \"x\"; it must be a number"},
      {R"("rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4,
           "original_max_position_embeddings": 8192})",
       "rope_scaling.factor is missing; \"llama3\" scaling needs it"},
      {R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": null})",
       "rope_scaling.original_max_position_embeddings is null; \"llama3\" scaling needs it"},
      {R"("rope_scaling": {"rope_type": "yarn", "factor": 4})",
       "rope_scaling.original_max_position_embeddings is missing; \"yarn\" scaling needs it"},
      {R"("head_dim": 0)", "head_dim is 0; it must be at least 1; leave it out for hidden_size / "},
      {R"("rms_norm_eps": 1e999)", "not valid JSON"},
      {R"("max_position_embeddings": 99999999999999999999)",
       "max_position_embeddings is 1e+20; it must be a whole number"},
      {R"("hidden_act": 1)", "hidden_act is 1; it must be a string"},
  };
  for (const BadField& bad : table) {
    const std::string text = small_file("llama", concat(", ", bad.fields));
    EXPECT_THAT(refusal([&] { parse_model_config(text, "c.json"); }),
                AllOf(StartsWith("c.json: "), HasSubstr(bad.says)));
  }
  std::string mixed = config_json(hybrid());
  mixed.replace(mixed.find("\"head_dim\": 8"), 13, R"("attention_head_dim": 0)");
  EXPECT_THAT(refusal([&] { parse_model_config(mixed, "c.json"); }),
              StartsWith("c.json: attention_head_dim is 0; it must be at least 1"));
  const std::string windowed = small_file("mistral", R"(, "sliding_window": 0)");
  EXPECT_THAT(
      refusal([&] { parse_model_config(windowed, "c.json"); }),
      StartsWith("c.json: sliding_window is 0; it must be at least 1, or null for no window"));
  EXPECT_THAT(refusal([&] { parse_model_config(R"({"model_type": "bert"})", "c.json"); }),
              HasSubstr("c.json: model_type is \"bert\"; known are deepseek_v3, llama, mistral, "
                        "mixtral, nemotron_h, "));
  const auto refused_next = [](const char* fields) {
    return refusal([&] { parsed_next(fields); });
  };
  EXPECT_THAT(refused_next(R"(, "layer_types": ["mamba"])"),
              HasSubstr("the known layers are linear_attention and full_attention"));
  EXPECT_THAT(refused_next(R"(, "full_attention_interval": 0)"),
              HasSubstr("c.json: full_attention_interval is 0; it must be at least 1"));
  EXPECT_THAT(refused_next(R"(, "mlp_only_layers": ["a"])"),
              HasSubstr("c.json: mlp_only_layers is"));
  EXPECT_THAT(refusal([] { parsed_deepseek(R"(, "moe_layer_freq": 2)"); }),
              HasSubstr("c.json: moe_layer_freq is 2; only 1 is supported"));
  EXPECT_THAT(refusal([] { parsed_deepseek(R"(, "qk_rope_head_dim": 0)"); }),
              HasSubstr("c.json: qk_rope_head_dim is 0; it must be at least 1"));
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
    const std::string text = small_file("llama", concat(", ", bad.fields));
    const ModelConfig config = parse_model_config(text, "c.json");
    EXPECT_NO_THROW(build_model("m", config));
    EXPECT_THAT(refusal([&] { check_trainable(config); }), HasSubstr(bad.says));
  }
  const ModelConfig windowed =
      parse_model_config(small_file("qwen2", R"(, "use_sliding_window": true)"), "c.json");
  EXPECT_THAT(refusal([&] { check_trainable(windowed); }),
              HasSubstr("c.json: use_sliding_window is true; only false is computed"));
  for (const BadField& bad :
       std::vector<BadField>{{R"(, "scoring_func": "softmax")",
                              "c.json: scoring_func is \"softmax\"; only \"sigmoid\" is computed"},
                             {R"(, "topk_method": "greedy")",
                              "c.json: topk_method is \"greedy\"; only \"noaux_tc\" is computed"},
                             {R"(, "quantization_config": {"quant_method": "fp8"})",
                              "; weights with scales are not read"}})
    EXPECT_THAT(refusal([&] { check_trainable(parsed_deepseek(bad.fields)); }),
                HasSubstr(bad.says));
  EXPECT_EQ(refusal([] { check_trainable(parsed_next(R"(, "num_nextn_predict_layers": 1)")); }),
            "c.json: num_nextn_predict_layers is 1; only 0 is computed");
}

// Each model_type has a class of the package, which has some options and not others.
TEST(ConfigJson, RefusesWhatAClassDoesNotHave) {
  LlamaConfig windowed = llama();
  windowed.sliding_window = 4;
  EXPECT_EQ(refusal([&] { check_trainable(windowed); }),
            "sliding_window is 4; with model_type llama only 0 is possible");
  LlamaConfig biased = llama();
  biased.attention_bias = true;
  biased.family = LlamaFamily::kMistral;
  EXPECT_THAT(refusal([&] { config_json(biased); }),
              HasSubstr("attention_bias is true; with model_type mistral only false is possible"));
  Qwen3NextConfig predicting = qwen3_next();
  predicting.decoder.num_nextn_predict_layers = 1;
  EXPECT_THAT(refusal([&] { check_trainable(predicting); }),
              HasSubstr("num_nextn_predict_layers is 1; with model_type qwen3_next only 0"));
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
  EXPECT_EQ(vocab_size_of(find_preset("tiny")->config), 257);
  EXPECT_EQ(model_by_name("tiny").parameters(), 1'673'280);
}

}  // namespace
}  // namespace fsdp::config_json_test
