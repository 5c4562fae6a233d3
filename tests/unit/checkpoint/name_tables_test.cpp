// checkpoint/names/name_tables.h: tables of rules that people write.
#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/check.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/names/name_tables.h"

namespace fsdp::name_tables_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

TEST(NameRulesJson, SaysEverythingARuleCanSay) {
  const NameRules rules = parse_name_rules(R"json({
    "rules": [
      {"title": "SwiGLU", "pattern": "fc1.(weight|bias)", "dim": 1,
       "sections": [{"name": "$0_w"}, {"name": "$0_v", "size": 4},
                    {"name": "$0_x", "size": "a + 2"}],
       "when": {"field": "gated", "equals": 1, "unknown": "apply"}},
      {"pattern": "experts.#.*", "rename": "experts.{$1 + first}.$2", "scope": "model"},
      {"pattern": "b", "sections": [{"name": "c"}, {"name": "d"}], "when": {"field": "x"}}
    ],
    "fields": [{"modules": "layers.*", "values": {"a": 3, "first": -8}}]})json",
                                           "table.json");
  EXPECT_THAT(
      rules.rules(),
      ElementsAre(NameRule{.title = "SwiGLU",
                           .pattern = "fc1.(weight|bias)",
                           .dim = 1,
                           .sections = {{"$0_w"}, {"$0_v", "4"}, {"$0_x", "a + 2"}},
                           .condition = FieldCondition{.field = "gated",
                                                       .equals = 1,
                                                       .unknown = FieldCondition::Unknown::kApply}},
                  NameRule{.title = "",
                           .pattern = "experts.#.*",
                           .sections = {{"experts.{$1 + first}.$2"}},
                           .scope = NameRule::Scope::kModelNames},
                  NameRule{.title = "",
                           .pattern = "b",
                           .sections = {{"c"}, {"d"}},
                           .condition = FieldCondition{.field = "x"}}));
  EXPECT_THAT(rules.fields(), ElementsAre(FieldsOfModules{"layers.*", {{"a", 3}, {"first", -8}}}));
}

TEST(NameRulesJson, KnowsTheTableOfMegatronByName) {
  const NameRules rules = parse_name_rules(
      R"({"rules": "megatron", "fields": [{"modules": "*", "values": {"expert_offset": 2}}]})",
      "t");
  EXPECT_EQ(rules.rules(), megatron_rules());
  EXPECT_EQ(rules.sections("mlp.experts.linear_fc2.weight1", std::vector<int64_t>{2})[0].name,
            "mlp.experts.linear_fc2.weight3");
}

TEST(NameRulesJson, RefusesEveryDefectInOneSentence) {
  const auto refuses = [](const std::string& text, const std::string& why) {
    EXPECT_THAT([&] { parse_name_rules(text, "table.json"); },
                ThrowsMessage<UsageError>(AllOf(StartsWith("table.json"), HasSubstr(why))))
        << text;
  };
  const auto refuses_rule = [&](const std::string& rule, const std::string& why) {
    refuses(R"({"rules": [{"pattern": "a", "rename": "b"}, )" + rule + "]}", why);
  };
  refuses("{", "not valid JSON");
  refuses("[]", "the document is []; it must be an object");
  refuses("{}", "rules is missing; add it");
  refuses(R"({"rules": [], "rules": []})", "has the key 'rules' twice");
  refuses(R"({"rules": "deepspeed"})", R"(rules is "deepspeed"; give a list of rules)");
  refuses(R"({"rules": 3})", "rules is 3; it must be an array");
  refuses(R"({"rule": []})", "rule is not a known field; did you mean 'rules'?");
  refuses_rule("7", "rules[1] is 7; it must be an object");
  refuses_rule(R"({"rename": "b"})", "rules[1].pattern is missing");
  refuses_rule(R"({"pattern": "a"})", "rules[1].sections is missing");
  refuses_rule(R"({"pattern": "a", "sections": []})", "rules[1]: rule 'a' has no sections");
  refuses_rule(R"({"pattern": "a(", "rename": "b"})", "rules[1]: pattern is 'a('");
  refuses_rule(R"({"pattern": "a", "rename": "b", "dim": 1})", "rules[1].dim is 1; a rule with");
  refuses_rule(R"({"pattern": "a", "rename": "b", "sections": []})", "rules[1].sections is []");
  refuses_rule(R"({"pattern": "a", "rename": "b", "axis": 1})",
               "rules[1].axis is not a known field");
  refuses_rule(R"({"pattern": "a", "rename": "b", "scope": "all"})", "use one of every, model");
  refuses_rule(R"({"pattern": "a", "rename": "b", "when": 1})", "rules[1].when is 1");
  refuses_rule(R"({"pattern": "a", "rename": "b", "when": {}})", "rules[1].when.field is missing");
  refuses_rule(R"({"pattern": "a", "rename": "b", "when": {"field": "x", "unknown": "no"}})",
               "use one of skip, apply");
  refuses_rule(R"({"pattern": "a", "sections": [{"name": "b", "size": -1}]})",
               "rules[1].sections[0].size is -1; it must be a whole number from 0 up");
  refuses_rule(R"({"pattern": "a", "sections": [{"name": "b", "size": ""}]})",
               "leave it out for an equal part");
  refuses_rule(R"({"pattern": "a", "sections": [{"name": "b", "size": "a * 2"}]})",
               "rules[1]: 'a * 2' is not a sum");
  refuses_rule(R"({"pattern": "a", "sections": [{"size": 1}]})", "sections[0].name is missing");
  refuses(R"({"rules": [], "fields": [{"modules": "a"}]})", "fields[0].values is missing");
  refuses(R"({"rules": [], "fields": [{"modules": "a", "values": [1]}]})",
          "fields[0].values is [1]; it must be an object");
  refuses(R"({"rules": [], "fields": [{"modules": "a", "values": {"x": true}}]})",
          "fields[0].values.x is true; it must be a whole number");
}

// --- megatron rules ------------------------------------------------------------------------------

// checkpoint/names/name_tables.h: every transform, with names and sizes.

ModuleFields fields() {
  return {
      {"decoder.layers.*", {{"q_lora_rank", 24}, {"kv_lora_rank", 16}, {"qk_pos_emb_head_dim", 8}}},
      {"decoder.layers.1", {{"gated_linear_unit", 0}}},
      {"decoder.layers.2.self_attention", {{"qk_dim", 4}, {"v_dim", 8}, {"num_value_heads", 2}}},
      {"mtp.layers.1", {{"mamba_mtp", 1}}},
      {"*", {{"expert_offset", 4}}}};
}

const NameRules& rules() {
  static const NameRules table(megatron_rules(), fields());
  return table;
}

// The sections as "name [size of dim 0]": all of these rules divide dim 0, and it is checked here
// that nothing else changes and nothing is left out.
std::vector<std::string> stored(const std::string& name, const std::vector<int64_t>& shape) {
  std::vector<std::string> result;
  int64_t begin = 0;
  for (const TensorSection& section : rules().sections(name, shape)) {
    std::vector<int64_t> whole = section.shape;
    std::vector<int64_t> offsets(shape.size(), 0);
    if (!shape.empty()) {
      whole[0] = shape[0];
      offsets[0] = begin;
      begin += section.shape[0];
    }
    EXPECT_EQ(whole, shape);
    EXPECT_EQ(section.offsets, offsets);
    result.push_back(concat(section.name, " [", section.shape.at(0), "]"));
    // A checkpoint with these names is read as it is.
    EXPECT_THAT(rules().sections_of_stored(section.name, section.shape),
                ElementsAre(TensorSection{section.name, section.shape,
                                          std::vector<int64_t>(shape.size(), 0)}));
  }
  EXPECT_EQ(begin, shape.at(0));
  return result;
}

TEST(MegatronRules, DivideGatedMlps) {
  EXPECT_THAT(stored("decoder.layers.0.mlp.linear_fc1.weight", {12, 5}),
              ElementsAre("decoder.layers.0.mlp.linear_fc1.weight_w [6]",
                          "decoder.layers.0.mlp.linear_fc1.weight_v [6]"));
  EXPECT_THAT(stored("module.mlp.linear_fc1.bias", {12}),
              ElementsAre("module.mlp.linear_fc1.bias_w [6]", "module.mlp.linear_fc1.bias_v [6]"));
  EXPECT_THAT(stored("l.mlp.shared_experts.linear_fc1.weight", {4, 2}),
              ElementsAre("l.mlp.shared_experts.linear_fc1.weight_w [2]",
                          "l.mlp.shared_experts.linear_fc1.weight_v [2]"));
  // The norm that is absorbed by the projection, the second projection, and names that only look
  // like these stay whole.
  for (const char* whole : {"l.mlp.linear_fc1.layer_norm_weight", "l.mlp.linear_fc2.weight",
                            "l.other_mlp.linear_fc1.weight", "l.mlp.router.weight"})
    EXPECT_THAT(stored(whole, {4, 2}), ElementsAre(concat(whole, " [4]")));
}

TEST(MegatronRules, LeaveMlpsWholeThatAreNotGated) {
  EXPECT_THAT(stored("decoder.layers.1.mlp.linear_fc1.weight", {7, 5}),
              ElementsAre("decoder.layers.1.mlp.linear_fc1.weight [7]"));
  EXPECT_THAT(stored("decoder.layers.11.mlp.linear_fc1.weight", {8, 5}),
              ElementsAre("decoder.layers.11.mlp.linear_fc1.weight_w [4]",
                          "decoder.layers.11.mlp.linear_fc1.weight_v [4]"));
}

TEST(MegatronRules, DivideGatedDeltaNets) {
  const std::string net = "decoder.layers.2.self_attention.";
  EXPECT_THAT(stored(net + "in_proj.weight", {28, 3}),
              ElementsAre(net + "in_proj.weight.query [4]", net + "in_proj.weight.key [4]",
                          net + "in_proj.weight.value [8]", net + "in_proj.weight.z [8]",
                          net + "in_proj.weight.beta [2]", net + "in_proj.weight.alpha [2]"));
  for (const std::string kind : {"weight", "bias"})
    EXPECT_THAT(
        stored(net + "conv1d." + kind, {16, 1, 4}),
        ElementsAre(net + "conv1d." + kind + ".query [4]", net + "conv1d." + kind + ".key [4]",
                    net + "conv1d." + kind + ".value [8]"));
  // A Mamba layer has an in_proj and a conv1d of another kind.
  EXPECT_THAT(stored("decoder.layers.3.mixer.in_proj.weight", {28, 3}),
              ElementsAre("decoder.layers.3.mixer.in_proj.weight [28]"));
  EXPECT_THAT(stored("decoder.layers.3.mixer.conv1d.weight", {16, 1, 4}),
              ElementsAre("decoder.layers.3.mixer.conv1d.weight [16]"));
}

TEST(MegatronRules, DivideFusedDownProjections) {
  const std::string layer = "decoder.layers.0.";
  EXPECT_THAT(stored(layer + "self_attention.linear_qkv_down_proj.weight", {48, 5}),
              ElementsAre(layer + "self_attention.linear_q_down_proj.weight [24]",
                          layer + "self_attention.linear_kv_down_proj.weight [24]"));
  EXPECT_THAT(stored(layer + "self_attention.linear_qkv_down_proj.layer_norm_weight", {5}),
              ElementsAre(layer + "input_layernorm.weight [5]"));
  EXPECT_THAT(stored(layer + "self_attention.linear_qkv_down_proj.layer_norm_bias", {5}),
              ElementsAre(layer + "input_layernorm.bias [5]"));
}

TEST(MegatronRules, CountExpertsAmongAll) {
  const std::string experts = "decoder.layers.0.mlp.experts.";
  EXPECT_THAT(
      stored(experts + "linear_fc1.weight3", {6, 2}),
      ElementsAre(experts + "linear_fc1.weight7_w [3]", experts + "linear_fc1.weight7_v [3]"));
  EXPECT_THAT(stored(experts + "linear_fc1.bias0", {6}),
              ElementsAre(experts + "linear_fc1.bias4_w [3]", experts + "linear_fc1.bias4_v [3]"));
  EXPECT_THAT(stored(experts + "linear_fc2.weight12", {6, 2}),
              ElementsAre(experts + "linear_fc2.weight16 [6]"));
  EXPECT_THAT(stored(experts + "local_experts.9.linear_fc1.weight", {6, 2}),
              ElementsAre(experts + "local_experts.13.linear_fc1.weight_w [3]",
                          experts + "local_experts.13.linear_fc1.weight_v [3]"));
  EXPECT_THAT(stored(experts + "local_experts.0.linear_fc2.bias", {2}),
              ElementsAre(experts + "local_experts.4.linear_fc2.bias [2]"));
}

TEST(MegatronRules, RenameTheLayersOfMultiTokenPrediction) {
  EXPECT_THAT(stored("mtp.layers.0.mtp_model_layer.mlp.linear_fc1.weight", {4, 2}),
              ElementsAre("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight_w [2]",
                          "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight_v [2]"));
  EXPECT_THAT(stored("mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight1", {4, 2}),
              ElementsAre("mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight5_w [2]",
                          "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight5_v [2]"));
  EXPECT_THAT(stored("mtp.layers.1.mtp_model_layer.norm.weight", {4}),
              ElementsAre("mtp.layers.1.mtp_model_layer.norm.weight [4]"));
}

TEST(MegatronRules, DivideFusedTensorsOfACheckpoint) {
  EXPECT_THAT(
      rules().sections_of_stored("decoder.layers.0.mlp.experts.linear_fc1.weight7",
                                 std::vector<int64_t>{6, 2}),
      ElementsAre(
          TensorSection{"decoder.layers.0.mlp.experts.linear_fc1.weight7_w", {3, 2}, {0, 0}},
          TensorSection{"decoder.layers.0.mlp.experts.linear_fc1.weight7_v", {3, 2}, {3, 0}}));
}

}  // namespace
}  // namespace fsdp::name_tables_test
