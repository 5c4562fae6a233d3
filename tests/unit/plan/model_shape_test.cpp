// plan/: which tensors the known models have.
#include "fsdp/plan/model_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "fsdp/base/error.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_tensors.h"

namespace fsdp::model_shape_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A tensor, or a part of one.
TensorShape tensor_of(const ModelShape& model, const std::string& name) {
  for (const UnitShape& unit : model.units)
    for (TensorShape tensor : unit.tensors) {
      if (tensor.name == name) return tensor;
      if (std::count(tensor.parts.begin(), tensor.parts.end(), name) != 1) continue;
      tensor.shape[0] /= static_cast<int64_t>(tensor.parts.size());
      return tensor;
    }
  throw std::out_of_range(name);
}

TEST(ModelCatalog, CountsParametersAsPublished) {
  EXPECT_EQ(model_by_name("llama3-8b").parameters(), 8'030'261'248);
  EXPECT_EQ(model_by_name("llama3-70b").parameters(), 70'553'706'496);
  EXPECT_EQ(model_by_name("mixtral-8x7b").parameters(), 46'702'792'704);
  EXPECT_EQ(model_by_name("qwen3-30b-a3b").parameters(), 30'532'122'624);
  // Without the layers of multi-token prediction that are published beside it.
  EXPECT_EQ(model_by_name("qwen3-next-80b-a3b").parameters(), 79'674'391'296);
  EXPECT_EQ(model_by_name("nemotron-h-8b").parameters(), 8'100'852'736);
  // TinyLlama's published count: same shape.
  EXPECT_EQ(model_by_name("llama-1b").parameters(), 1'100'048'384);
  EXPECT_EQ(model_by_name("llama-110m").parameters(), 114'582'016);
}

TEST(ModelCatalog, CountsDeepSeekAsItsCheckpointDoes) {
  const ModelShape model = model_by_name("deepseek-v3");
  const int64_t embedding = 129280LL * 7168;
  const UnitShape& mtp = model.units.back();
  EXPECT_EQ(mtp.name, "model.layers.61");
  const int64_t router_biases = 58 * 256;  // buffers, of which no unit gathers anything
  EXPECT_EQ(model.parameters() - mtp.numel(), 671'026'419'200 - router_biases);
  EXPECT_EQ(mtp.numel() / 100'000'000, 116);  // the model card: "11.5B unique", without eh_proj
  // The files hold 3,918,786,560 bf16 and 680,571,043,840 fp8 elements, and the embedding and head
  // a second time for the MTP layer.
  EXPECT_EQ(model.parameters(), 3'918'786'560 + 680'571'043'840 - 2 * embedding);
}

TEST(ModelCatalog, FindsEveryModelByItsName) {
  for (const std::string& name : model_names()) EXPECT_EQ(model_by_name(name).name, name);
  EXPECT_THAT([] { model_by_name("lama3-8b"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'llama3-8b'?")));
  EXPECT_THAT([] { model_by_name("resnet"); },
              ThrowsMessage<UsageError>(HasSubstr("known models are llama3-8b")));
}

TEST(ModelCatalog, UsesEmbeddingAndHeadAgainForMultiTokenPrediction) {
  const ModelShape model = model_by_name("deepseek-v3");
  ASSERT_EQ(model.units.size(), 64u);  // embedding, 61 blocks, head, MTP block
  ASSERT_EQ(model.uses.size(), 66u);
  const int64_t head = 62;
  EXPECT_EQ(model.units[62].name, "lm_head");
  EXPECT_THAT(std::vector<int64_t>(model.uses.end() - 4, model.uses.end()),
              ElementsAre(head, 0, 63, head));
}

TEST(ModelCatalog, NamesTensorsAsTheCheckpointsDo) {
  struct Row {
    const char* model;
    const char* tensor;
    std::vector<int64_t> shape;
  };
  for (const Row& row : std::vector<Row>{
           {"deepseek-v3", "model.layers.60.mlp.experts.255.down_proj.weight", {7168, 2048}},
           {"deepseek-v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", {576, 7168}},
           {"deepseek-v3", "model.layers.2.mlp.gate_proj.weight", {18432, 7168}},
           {"nemotron-h-8b", "backbone.layers.0.mixer.in_proj.weight", {18560, 4096}},
           {"nemotron-h-8b", "backbone.layers.0.mixer.conv1d.weight", {10240, 1, 4}},
           {"nemotron-h-8b", "backbone.layers.7.mixer.k_proj.weight", {1024, 4096}},
           {"mixtral-8x7b", "model.layers.31.block_sparse_moe.experts.7.w2.weight", {4096, 14336}}})
    EXPECT_EQ(tensor_of(model_by_name(row.model), row.tensor).shape, row.shape) << row.tensor;
  const ModelShape deepseek = model_by_name("deepseek-v3");
  EXPECT_TRUE(deepseek.units[3].buffers.empty());  // a dense layer
  ASSERT_EQ(deepseek.units[4].buffers.size(), 1U);
  EXPECT_EQ(deepseek.units[4].buffers[0].name, "model.layers.3.mlp.gate.e_score_correction_bias");
  EXPECT_EQ(deepseek.units[4].buffers[0].dtype, DType::kFloat32);
}

TEST(ModelShape, SplitsAUnitByDTypeAndGrid) {
  const ModelShape deepseek = model_by_name("deepseek-v3");
  UnitShape block = deepseek.units[10];
  block.tensors.insert(block.tensors.begin() + 1,
                       {.name = "in_fp32", .shape = {256}, .dtype = DType::kFloat32});
  const std::vector<TensorGroup> groups = group_tensors(block, DType::kBFloat16, {});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].dtype, DType::kBFloat16);
  EXPECT_EQ(groups[0].tensors.size(), block.tensors.size() - 1);
  EXPECT_EQ(groups[1].dtype, DType::kFloat32);
  ASSERT_EQ(groups[1].tensors.size(), 1u);
  EXPECT_EQ(block.tensors[static_cast<size_t>(groups[1].tensors[0])].name, "in_fp32");
  EXPECT_EQ(group_tensors(block, DType::kFloat32, {}).size(), 1u);
  const std::vector<TensorGroup> apart = group_tensors(block, DType::kBFloat16, {.ep = 8});
  ASSERT_EQ(apart.size(), 3u);
  EXPECT_EQ(apart[2].kind, ParameterKind::kExpert);
  EXPECT_EQ(apart[2].tensors.size(), 2u);
}

TEST(Architecture, TiedHeadUsesTheEmbeddingAgain) {
  const ModelShape model = build_model("tied", LlamaConfig{.vocab_size = 100,
                                                           .hidden_size = 8,
                                                           .num_hidden_layers = 1,
                                                           .num_attention_heads = 2,
                                                           .num_key_value_heads = 1,
                                                           .intermediate_size = 16,
                                                           .tie_word_embeddings = true});
  EXPECT_THAT(model.uses, ElementsAre(0, 1, 2, 0));
  EXPECT_EQ(model.units.back().numel(), 8);
}

TEST(ModelShape, RefusesWhatCannotBePlanned) {
  const TensorShape weight{"w", {4, 4}, {}};
  const auto message_of = [](const ModelShape& model) -> std::string {
    try {
      model.validate();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message_of({"m", {}, {}}), HasSubstr("has no units"));
  EXPECT_THAT(message_of({"m", {{"u", {}}}, {0}}), HasSubstr("unit 'u' has no tensors"));
  EXPECT_THAT(message_of({"m", {{"u", {weight, weight}}}, {0}}), HasSubstr("'w' appears twice"));
  EXPECT_THAT(message_of({"m", {{"u", {weight}}, {"u", {weight}}}, {0, 1}}),
              HasSubstr("unit name 'u' appears twice"));
  EXPECT_THAT(message_of({"m", {{"u", {weight}}}, {}}), HasSubstr("is never used"));
  EXPECT_THAT(message_of({"m", {{"u", {weight}}}, {0, 1}}), HasSubstr("name unit 1"));
  EXPECT_THAT(message_of({"m", {{"u", {{"w", {-1}, {}}}}}, {0}}), HasSubstr("negative"));
  EXPECT_THAT(message_of({"m", {{"u", {{"w", {1LL << 40, 1LL << 40}, {}}}}}, {0}}),
              HasSubstr("check its shapes"));
  EXPECT_EQ(message_of({"m", {{"u", {weight, {"scalar", {}, {}}}}}, {0}}), "");
}

}  // namespace
}  // namespace fsdp::model_shape_test
