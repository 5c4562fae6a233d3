// checkpoint/names/name_tables.h: every transform, with names and sizes.
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/names/name_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp::megatron_rules_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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

TEST(MegatronRules, RefuseOddGatedMlps) {
  EXPECT_THAT(
      [] {
        stored("decoder.layers.0.mlp.linear_fc1.weight", {7, 5});
      },
      ThrowsMessage<Error>(HasSubstr("7 is not divisible by 2")));
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
  EXPECT_THAT(
      [&] {
        stored(net + "in_proj.weight", {30, 3});
      },
      ThrowsMessage<Error>(HasSubstr("divides it into [4, 4, 8, 8, 2, 2]")));
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
  EXPECT_THAT(
      [&] {
        stored(layer + "self_attention.linear_qkv_down_proj.weight", {50, 5});
      },
      ThrowsMessage<Error>(
          HasSubstr("has 50 along dim 0, but rule 'MLA' divides it into [24, 24]")));
  EXPECT_THAT(
      [] {
        stored("x.linear_qkv_down_proj.weight", {48, 5});
      },
      ThrowsMessage<Error>(HasSubstr("the field 'q_lora_rank' of the module of tensor "
                                     "'x.linear_qkv_down_proj.weight' is unknown")));
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

TEST(MegatronRules, AskForTheFirstExpertsIndex) {
  const NameRules without(megatron_rules());
  EXPECT_THAT(
      [&] {
        without.sections("mlp.experts.linear_fc2.weight0", std::vector<int64_t>{2, 2});
      },
      ThrowsMessage<Error>(HasSubstr("the field 'expert_offset' of the module of tensor")));
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
}  // namespace fsdp::megatron_rules_test
