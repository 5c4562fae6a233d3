// Tensors written as HuggingFace does and as a sharded checkpoint: all of them, exactly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "fsdp/base/error.h"
#include "fsdp/checkpoint/format/manifest_text.h"
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

TEST(DivideIntoFiles, FillsEachFileAndNeverSplitsATensor) {
  const std::vector<int64_t> sizes = {4, 4, 3, 20, 1, 9, 2};
  const auto files = divide_into_files(sizes, 10);
  EXPECT_THAT(files, ElementsAre(FlatRange{0, 2}, FlatRange{2, 3}, FlatRange{3, 4}, FlatRange{4, 6},
                                 FlatRange{6, 7}));
  EXPECT_EQ(divide_into_files(sizes, 43).size(), 1u);
  EXPECT_EQ(divide_into_files({}, 10).size(), 1u);
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
  try {
    write_huggingface_files(directory_.path(), std::vector{catalog.model().at("w")}, reads, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("tensor 'w' has 1 numbers"), HasSubstr("fp16")));
  }
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

TEST_F(ConvertedFiles, EveryRowBelongsToOneRank) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{7, 3}, {1, 9}, {100, 1}, {6}, {}, {0, 3}, {5, 2, 2}})
    for (const int64_t ranks : {1, 2, 3, 7, 8, 300}) {
      const StoredTensor tensor{"t", DType::kFloat32, shape};
      int64_t end = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const FlatRange share = share_of_rows(tensor, 4, rank, ranks);
        if (share.empty()) continue;
        EXPECT_EQ(share.begin, end) << list_text(shape);
        end = share.end;
        EXPECT_EQ(boxes(shape, share).size(), 1u) << list_text(shape);
      }
      EXPECT_EQ(end, numel_of(tensor)) << list_text(shape);
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

TEST_F(ConvertedFiles, OnlyFilesThatModelsArePublishedWithAreWrittenByNoRank) {
  write_checkpoint(directory_ / "c", {.model = some_tensors(), .config = "{}"});
  const std::string path = directory_ / "c/manifest.json";
  std::string manifest = read_text(path);
  manifest.replace(manifest.find("config.json"), 11, "other.json!");
  write_text(path, with_checksum(manifest));
  try {
    const TensorCatalog catalog(directory_ / "c");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no rank wrote other.json!"));
  }
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

TEST_F(ConvertedFiles, TheTypeAModelIsPublishedInIsReadFromEitherName) {
  const auto dtype = [](const char* config) { return published_dtype(config, "config.json"); };
  EXPECT_EQ(dtype(R"({"dtype": "bfloat16"})"), DType::kBFloat16);
  EXPECT_EQ(dtype(R"({"torch_dtype": "float16"})"), DType::kFloat16);
  EXPECT_EQ(dtype(R"({"dtype": "float32", "torch_dtype": "float16"})"), DType::kFloat32);
  for (const char* config : {"{}", R"({"dtype": "float8_e4m3fn"})", R"({"dtype": {"a": 1}})"})
    EXPECT_EQ(dtype(config), std::nullopt) << config;
}

TEST_F(ConvertedFiles, DamagedConfigJsonIsRefused) {
  write_checkpoint(directory_ / "c", {.model = some_tensors(), .config = "{}"});
  write_text(directory_ / "c/config.json", "{ }");
  EXPECT_THROW(TensorCatalog(directory_ / "c").model_config(), Error);
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
  for (const char* before : {R"({"torch_dtype": "float16"})", R"({"dtype": "float16"})", "{}"}) {
    const Json after = Json::parse(with_stored_dtype(before, "s", DType::kFloat32));
    EXPECT_EQ(after.at("dtype"), "float32");
    EXPECT_EQ(after.at("torch_dtype"), "float32");
  }
}

}  // namespace
}  // namespace fsdp::testing::converted_files_test
