// Names that receivers know: published ones, and those of vLLM's fused tensors.
#include "fsdp/checkpoint/patches/output_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::output_tensors_test {
namespace {

using ::testing::ElementsAre;

StoredTensor bf16(const std::string& name, std::vector<int64_t> shape) {
  return {name, DType::kBFloat16, std::move(shape)};
}

TEST(OutputTensors, AreAsPublished) {
  const std::vector<StoredTensor> published = {bf16("a.q_proj.weight", {4, 2}), bf16("b", {3})};
  const OutputTensors output = as_published(published);
  EXPECT_EQ(output.tensors, published);
  EXPECT_EQ(output.places.at("b").tensor, 1u);
  EXPECT_EQ(output.places.at("b").offset, 0);
}

TEST(OutputTensors, OfVllmHaveQueriesKeysAndValuesOneAfterTheOther) {
  const OutputTensors output = as_vllm_has_them(
      {bf16("l.0.self_attn.q_proj.weight", {8, 4}), bf16("l.0.self_attn.k_proj.weight", {2, 4}),
       bf16("l.0.self_attn.v_proj.weight", {2, 4}), bf16("l.0.self_attn.v_proj.bias", {2}),
       bf16("l.0.self_attn.o_proj.weight", {4, 8}), bf16("l.0.mlp.up_proj.weight", {6, 4}),
       bf16("l.0.mlp.gate_proj.weight", {6, 4})});
  EXPECT_THAT(output.tensors, ElementsAre(bf16("l.0.self_attn.qkv_proj.weight", {12, 4}),
                                          bf16("l.0.self_attn.v_proj.bias", {2}),
                                          bf16("l.0.self_attn.o_proj.weight", {4, 8}),
                                          bf16("l.0.mlp.gate_up_proj.weight", {12, 4})));
  EXPECT_EQ(output.places.at("l.0.self_attn.q_proj.weight").offset, 0);
  EXPECT_EQ(output.places.at("l.0.self_attn.k_proj.weight").offset, 32);
  EXPECT_EQ(output.places.at("l.0.self_attn.v_proj.weight").offset, 40);
  EXPECT_EQ(output.places.at("l.0.mlp.gate_proj.weight").offset, 0);
  EXPECT_EQ(output.places.at("l.0.mlp.up_proj.weight").offset, 24);
  EXPECT_EQ(output.places.at("l.0.mlp.up_proj.weight").tensor, 3u);
}

TEST(OutputTensors, OfVllmHaveAllExperts) {
  std::vector<StoredTensor> published;
  for (int expert = 0; expert < 12; ++expert) {
    const std::string prefix = "m.experts." + std::to_string(expert);
    published.push_back(bf16(prefix + ".w1.weight", {5, 3}));
    published.push_back(bf16(prefix + ".w2.weight", {3, 5}));
    published.push_back(bf16(prefix + ".w3.weight", {5, 3}));
  }
  const OutputTensors output = as_vllm_has_them(published);
  EXPECT_THAT(output.tensors, ElementsAre(bf16("m.experts.w13_weight", {12, 10, 3}),
                                          bf16("m.experts.w2_weight", {12, 3, 5})));
  EXPECT_EQ(output.places.at("m.experts.10.w1.weight").offset, 10 * 30);
  EXPECT_EQ(output.places.at("m.experts.10.w3.weight").offset, 10 * 30 + 15);
  EXPECT_EQ(output.places.at("m.experts.10.w2.weight").offset, 10 * 15);
}

TEST(OutputTensors, WithAPartOfAnotherTypeStayAsTheyAre) {
  const std::vector<StoredTensor> published = {bf16("m.gate_proj.weight", {6, 4}),
                                               {"m.up_proj.weight", DType::kFloat32, {6, 4}},
                                               bf16("e.experts.1.w2.weight", {3, 5})};
  EXPECT_EQ(as_vllm_has_them(published).tensors, published);
}

}  // namespace
}  // namespace fsdp::output_tensors_test
