// Tensors written as HuggingFace does and as a sharded checkpoint: all of them, exactly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "fsdp/base/error.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/tools/converted_files.h"
#include "fsdp/checkpoint/tools/verify_files.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::converted_files_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;
using Json = nlohmann::ordered_json;

std::vector<WholeTensor> some_tensors() {
  const std::vector<int64_t> integers = {1, -2, 3};
  return {counting("w", {7, 5}),       counting("conv", {3, 2, 2}),
          counting("bias", {7}),       floats("scalar", {}, {2.5f}),
          floats("empty", {0, 4}, {}), whole_tensor("table", {3}, integers, DType::kInt64)};
}

void expect_tensors(const TensorCatalog& catalog, const std::vector<WholeTensor>& expected) {
  ASSERT_EQ(catalog.model().size(), expected.size());
  for (const WholeTensor& tensor : expected) {
    const CatalogTensor& stored = catalog.model().at(tensor.name);
    EXPECT_EQ(stored.tensor.dtype, tensor.dtype);
    EXPECT_EQ(stored.tensor.shape, tensor.shape);
    EXPECT_EQ(bytes_of_stored(catalog, stored), tensor.bytes) << tensor.name;
  }
}

std::vector<CatalogTensor> in_order(const TensorCatalog& catalog,
                                    const std::vector<WholeTensor>& order) {
  std::vector<CatalogTensor> tensors;
  for (const WholeTensor& tensor : order) tensors.push_back(catalog.model().at(tensor.name));
  return tensors;
}

class ConvertedFiles : public ::testing::Test {
 protected:
  ConvertedFiles() { write_plain_file(directory_ / "in.safetensors", some_tensors()); }

  std::vector<std::string> export_to(const std::string& name, std::optional<DType> dtype,
                                     const HuggingFaceOptions& options) {
    const TensorCatalog catalog(directory_ / "in.safetensors");
    ConvertedReads reads(catalog.files(), dtype);
    std::filesystem::create_directories(directory_ / name);
    return write_huggingface_files(directory_ / name, in_order(catalog, some_tensors()), reads,
                                   options);
  }

  TempDir directory_;
};

TEST_F(ConvertedFiles, OneFileHasNoIndex) {
  EXPECT_THAT(export_to("hf", std::nullopt, {}), ElementsAre("model.safetensors"));
  expect_tensors(TensorCatalog(directory_ / "hf"), some_tensors());
  EXPECT_FALSE(std::filesystem::exists(directory_ / "hf/model.safetensors.index.json"));
  EXPECT_THAT(read_text(directory_ / "hf/model.safetensors"),
              HasSubstr(R"("__metadata__":{"format":"pt"})"));
}

TEST_F(ConvertedFiles, SeveralFilesHaveAnIndexOfAllTensors) {
  const auto files = export_to("hf", std::nullopt, {.max_file_bytes = 100});
  EXPECT_THAT(files,
              ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors"));
  expect_tensors(TensorCatalog(directory_ / "hf"), some_tensors());
  const Json index = Json::parse(read_text(directory_ / "hf/model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), 4 * (35 + 12 + 7 + 1) + 24);
  EXPECT_EQ(index.at("metadata").at("total_parameters"), 35 + 12 + 7 + 1 + 3);
  EXPECT_EQ(index.at("weight_map").size(), some_tensors().size());
  EXPECT_EQ(index.at("weight_map").at("w"), files[0]);
  EXPECT_EQ(index.at("weight_map").at("table"), files[2]);
}

TEST_F(ConvertedFiles, OnlyFloatingTensorsChangeTheirType) {
  export_to("hf", DType::kBFloat16, {.config = R"({"dtype": "float32", "z": 1e-05, "a": 2})"});
  const TensorCatalog catalog(directory_ / "hf");
  EXPECT_EQ(catalog.model().at("w").tensor.dtype, DType::kBFloat16);
  EXPECT_EQ(catalog.model().at("table").tensor.dtype, DType::kInt64);
  // Small whole numbers are exact.
  const std::string bytes = bytes_of_stored(catalog, catalog.model().at("bias"));
  EXPECT_EQ(bytes.substr(0, 6), std::string("\x00\x00\x80\x3F\x00\x40", 6));
  EXPECT_EQ(read_text(directory_ / "hf/config.json"),
            "{\n  \"dtype\": \"bfloat16\",\n  \"z\": 1e-05,\n  \"a\": 2,\n"
            "  \"torch_dtype\": \"bfloat16\"\n}\n");
}

TEST_F(ConvertedFiles, RefusesNumbersThatDoNotFit) {
  write_plain_file(directory_ / "large.safetensors", {floats("w", {2}, {1.0f, 1e6f})});
  const TensorCatalog catalog(directory_ / "large.safetensors");
  ConvertedReads reads(catalog.files(), DType::kFloat16);
  const std::vector<CatalogTensor> tensors = {catalog.model().at("w")};
  EXPECT_THAT(
      [&] { write_huggingface_files(directory_.path(), tensors, reads, {}); },
      ThrowsMessage<Error>(AllOf(HasSubstr("tensor 'w' has 1 numbers"), HasSubstr("fp16"))));
  EXPECT_FALSE(std::filesystem::exists(directory_ / "model.safetensors"));
}

TEST_F(ConvertedFiles, AShardedCheckpointOfAnyNumberOfRanksHoldsTheSame) {
  for (const int64_t ranks : {1, 2, 3, 8, 50}) {
    const std::string path = directory_ / ("ours" + std::to_string(ranks));
    write_checkpoint(path,
                     {.model = some_tensors(),
                      .moments = {counting("w.exp_avg", {7, 5}, 0.5f)},
                      .config = "{\"model_type\": \"x\"}"},
                     {.ranks = ranks, .write = {.block_bytes = 64}});
    const TensorCatalog catalog(path);
    expect_tensors(catalog, some_tensors());
    EXPECT_EQ(catalog.manifest()->num_ranks(), ranks);
    EXPECT_EQ(bytes_of_stored(catalog, catalog.moments().at("w.exp_avg")),
              counting("", {7, 5}, 0.5f).bytes);
    EXPECT_EQ(catalog.model_config(), "{\"model_type\": \"x\"}");
    EXPECT_EQ(catalog.model().at("w").boxes.size(),
              static_cast<size_t>(std::min<int64_t>(ranks, 7)));
  }
}

TEST_F(ConvertedFiles, KeepsWhatRanksHadWhereThereAreAsMany) {
  Manifest manifest;
  manifest.step = 12;
  manifest.mesh = {.outer = 2, .inner = 1};
  std::vector<RankRecord> ranks(2);
  ranks[1].random_state = "random";
  ranks[1].data_position = "epoch 3";
  const CheckpointParts parts{.model = some_tensors(), .manifest = manifest, .ranks = ranks};
  write_checkpoint(directory_ / "same", parts, {.ranks = 2});
  const TensorCatalog same(directory_ / "same");
  EXPECT_EQ(same.manifest()->step, 12);
  EXPECT_EQ(same.manifest()->mesh.outer, 2);
  EXPECT_EQ(same.ranks()[1].random_state, "random");
  EXPECT_EQ(same.ranks()[1].data_position, "epoch 3");
  write_checkpoint(directory_ / "more", parts, {.ranks = 3});
  const TensorCatalog more(directory_ / "more");
  EXPECT_EQ(more.manifest()->mesh.inner, 3);
  EXPECT_EQ(more.ranks()[1].random_state, "");
}

TEST_F(ConvertedFiles, FilesOfAPublishedModelTravelAlong) {
  const std::vector<ModelFile> files = {{"generation_config.json", "{}\n"},
                                        {"tokenizer.json", std::string("\xff\0\n", 3)},
                                        {"chat_template.jinja", ""}};
  write_checkpoint(directory_ / "c",
                   {.model = some_tensors(), .config = "{}", .model_files = files});
  write_text(directory_ / "c/notes.txt", "of nobody");
  EXPECT_EQ(stored_model_files(directory_ / "c"), files);
  EXPECT_THAT(verify_files(directory_ / "c").damaged, IsEmpty());
  export_to("hf", std::nullopt,
            {.config = "{}", .model_files = stored_model_files(directory_ / "c")});
  EXPECT_EQ(stored_model_files(directory_ / "hf"), files);
  EXPECT_EQ(stored_model_files(directory_ / "hf/model.safetensors"), files);
  change_byte(directory_ / "c/tokenizer.json", 0);
  EXPECT_THAT([&] { stored_model_files(directory_ / "c"); },
              ThrowsMessage<Error>(HasSubstr("tokenizer.json is not what was written")));
  EXPECT_THAT(verify_files(directory_ / "c").damaged, SizeIs(1));
}

TEST_F(ConvertedFiles, ConfigJsonLiesBesideFilesOfOtherTools) {
  EXPECT_EQ(TensorCatalog(directory_ / "in.safetensors").model_config(), std::nullopt);
  write_text(directory_ / "config.json", "{\"a\": 1}");
  EXPECT_EQ(TensorCatalog(directory_ / "in.safetensors").model_config(), "{\"a\": 1}");
  EXPECT_EQ(TensorCatalog(directory_.path()).model_config(), "{\"a\": 1}");
}

TEST(ModelConfigText, SaysWhatItIs) {
  EXPECT_EQ(model_type_of(R"({"model_type": "llama"})", "s"), "llama");
  EXPECT_EQ(model_type_of("{}", "s"), "");
  EXPECT_TRUE(ties_word_embeddings(R"({"tie_word_embeddings": true})", "s"));
  EXPECT_FALSE(ties_word_embeddings("{}", "s"));
  EXPECT_THROW(with_stored_dtype("[]", "s", DType::kFloat32), UsageError);
  EXPECT_THROW(with_stored_dtype("{", "s", DType::kFloat32), UsageError);
}

TEST(ModelConfigText, NamesTheTypeForOldAndNewReaders) {
  const auto dtype = [](const char* config) { return published_dtype(config, "config.json"); };
  EXPECT_EQ(dtype(R"({"dtype": "bfloat16"})"), DType::kBFloat16);
  EXPECT_EQ(dtype(R"({"torch_dtype": "float16"})"), DType::kFloat16);
  EXPECT_EQ(dtype(R"({"dtype": "float32", "torch_dtype": "float16"})"), DType::kFloat32);
  for (const char* none : {"{}", R"({"dtype": "float8_e4m3fn"})", R"({"dtype": {"a": 1}})"})
    EXPECT_EQ(dtype(none), std::nullopt) << none;
  for (const char* before : {R"({"torch_dtype": "float16"})", R"({"dtype": "float16"})", "{}"}) {
    const Json after = Json::parse(with_stored_dtype(before, "s", DType::kFloat32));
    EXPECT_EQ(after.at("dtype"), "float32");
    EXPECT_EQ(after.at("torch_dtype"), "float32");
  }
}

// --- weight selection ----------------------------------------------------------------------------

// Which stored tensors become a model's weights, and the errors if they do not fit it.

std::vector<std::string> names_of(const std::vector<CatalogTensor>& tensors) {
  std::vector<std::string> names;
  for (const CatalogTensor& tensor : tensors) names.push_back(tensor.tensor.name);
  return names;
}

constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
constexpr const char* kHeadName = "lm_head.weight";

class WeightSelectionTest : public ::testing::Test {
 protected:
  TensorCatalog plain(const std::vector<WholeTensor>& tensors) {
    write_plain_file(directory_ / "w.safetensors", tensors);
    return TensorCatalog(directory_ / "w.safetensors");
  }

  std::string error_of(const TensorCatalog& catalog) const {
    try {
      select_weights(catalog, catalog.model(), expected_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  TempDir directory_;
  ExpectedWeights expected_{
      .source = "config.json",
      .tensors = {{kEmbeddingName, {3, 2}}, {"layer.10", {2}}, {"layer.9", {2}}}};
};

TEST_F(WeightSelectionTest, TakesWhatTheModelHasInItsOrder) {
  const TensorCatalog catalog = plain(
      {counting("layer.9", {2}), counting("layer.10", {2}), counting(kEmbeddingName, {3, 2})});
  const WeightSelection selection = select_weights(catalog, catalog.model(), expected_);
  EXPECT_THAT(names_of(selection.tensors), ElementsAre(kEmbeddingName, "layer.10", "layer.9"));
  EXPECT_THAT(selection.left_out, IsEmpty());
}

TEST_F(WeightSelectionTest, TellsAllThatDoesNotFitInOneSentence) {
  const TensorCatalog catalog =
      plain({counting("layer.9", {3}), counting(kEmbeddingName, {3, 2}), counting("other", {1})});
  EXPECT_THAT(error_of(catalog),
              AllOf(HasSubstr("does not fit config.json"), HasSubstr("it lacks 'layer.10'"),
                    HasSubstr("it also has 'other'"), HasSubstr("'layer.9 [3] instead of [2]'"),
                    HasSubstr("--config"), HasSubstr("--names"), Not(HasSubstr("embed"))));
}

TEST_F(WeightSelectionTest, LeavesOutTheTablesOfOldFiles) {
  const TensorCatalog catalog =
      plain({counting("layer.9", {2}), counting("layer.10", {2}), counting(kEmbeddingName, {3, 2}),
             counting("model.layers.0.self_attn.rotary_emb.inv_freq", {4})});
  const WeightSelection selection = select_weights(catalog, catalog.model(), expected_);
  EXPECT_EQ(selection.tensors.size(), 3u);
  EXPECT_THAT(selection.left_out, ElementsAre("model.layers.0.self_attn.rotary_emb.inv_freq"));
}

TEST_F(WeightSelectionTest, LeavesOutATiedHeadThatIsTheEmbedding) {
  expected_.ties_head = true;
  std::vector<WholeTensor> tensors = {counting("layer.9", {2}), counting("layer.10", {2}),
                                      counting(kEmbeddingName, {3, 2}),
                                      counting(kHeadName, {3, 2})};
  const TensorCatalog catalog = plain(tensors);
  EXPECT_THAT(select_weights(catalog, catalog.model(), expected_).left_out, ElementsAre(kHeadName));
  tensors.back() = counting(kHeadName, {3, 2}, 1.0f);
  EXPECT_THAT(error_of(plain(tensors)),
              AllOf(HasSubstr("have different values"), HasSubstr("tie_word_embeddings")));
  expected_.ties_head = false;
  EXPECT_THAT(error_of(plain(tensors)), HasSubstr("it also has 'lm_head.weight'"));
}

TEST_F(WeightSelectionTest, FindsASharedParameterByItsOtherNames) {
  GroupRecord group;
  group.members.push_back({.name = "decoder.head",
                           .aliases = {kEmbeddingName, kHeadName},
                           .shape = {3, 2},
                           .flat = {}});
  Manifest manifest;
  manifest.units.push_back({"unit", {group}});
  write_checkpoint(directory_ / "c",
                   {.model = {counting("decoder.head", {3, 2}), counting("layer.9", {2}),
                              counting("layer.10", {2})},
                    .manifest = manifest});
  const TensorCatalog catalog(directory_ / "c");
  expected_.tensors.push_back({kHeadName, {3, 2}});  // not tied there: it is written twice
  const WeightSelection selection = select_weights(catalog, catalog.model(), expected_);
  EXPECT_THAT(names_of(selection.tensors),
              ElementsAre(kEmbeddingName, "layer.10", "layer.9", kHeadName));
  EXPECT_EQ(bytes_of_stored(catalog, selection.tensors[0]),
            bytes_of_stored(catalog, selection.tensors[3]));
}

TEST_F(WeightSelectionTest, FindsASharedParameterByWhatRulesMakeOfItsOtherNames) {
  GroupRecord group;
  group.members.push_back(
      {.name = "dec.head", .aliases = {"dec.embed"}, .shape = {3, 2}, .flat = {}});
  Manifest manifest;
  manifest.units.push_back({"unit", {group}});
  write_checkpoint(
      directory_ / "c",
      {.model = {counting("dec.head", {3, 2}), counting("layer.9", {2}), counting("layer.10", {2})},
       .manifest = manifest});
  const NameRules rules(
      {{.title = "head", .pattern = "dec.head", .sections = {{kHeadName}}},
       {.title = "embedding", .pattern = "dec.embed", .sections = {{kEmbeddingName}}}});
  const TensorCatalog catalog(directory_ / "c");
  expected_.ties_head = true;
  const WeightSelection selection =
      select_weights(catalog, fsdp::apply(rules, catalog.model()), expected_, rules);
  EXPECT_THAT(names_of(selection.tensors), ElementsAre(kEmbeddingName, "layer.10", "layer.9"));
  EXPECT_THAT(selection.left_out, IsEmpty());
}

TEST_F(WeightSelectionTest, TakesAllInTheOrderTheyWereStored) {
  const std::vector<WholeTensor> tensors = {counting("b", {2}), counting("c", {2}),
                                            counting("a", {2})};
  const TensorCatalog files = plain(tensors);
  EXPECT_THAT(names_of(select_all(files, files.model()).tensors), ElementsAre("b", "c", "a"));
  write_checkpoint(directory_ / "c", {.model = tensors}, {.ranks = 2});
  const TensorCatalog ours(directory_ / "c");
  EXPECT_THAT(names_of(select_all(ours, ours.model()).tensors), ElementsAre("b", "c", "a"));
}

TEST_F(WeightSelectionTest, AppliesRulesInOrder) {
  const NameRules rules({{.title = "fused", .pattern = "kv", .sections = {{"v"}, {"k"}}},
                         {.title = "renamed", .pattern = "b", .sections = {{"z"}}}});
  const TensorCatalog catalog = plain({counting("b", {2}), counting("kv", {4, 2})});
  const auto renamed = apply_in_order(rules, select_all(catalog, catalog.model()).tensors);
  EXPECT_THAT(names_of(renamed), ElementsAre("z", "k", "v"));
  EXPECT_EQ(bytes_of_stored(catalog, renamed[1]), counting("", {2, 2}, 4.0f).bytes);
  const NameRules clash({{.title = "both", .pattern = "(b|kv)", .sections = {{"same"}}}});
  EXPECT_THROW(apply_in_order(clash, select_all(catalog, catalog.model()).tensors), Error);
}

}  // namespace
}  // namespace fsdp::testing::converted_files_test
