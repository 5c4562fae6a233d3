// Safetensors files of other tools, without checksums: alone, in a directory, with an index.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/safetensors_header.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "support/temp_dir.h"

namespace fsdp::plain_files_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class PlainFiles : public ::testing::Test {
 protected:
  void write(const std::string& file, std::vector<SafetensorsEntry> tensors,
             const std::string& sharding_info = "") {
    SafetensorsHeader header;
    header.tensors = std::move(tensors);
    if (!sharding_info.empty()) header.metadata["DCP_SHARDING_INFO"] = sharding_info;
    std::string bytes = write_safetensors_header(header);
    for (const SafetensorsEntry& entry : header.tensors)
      bytes.append(static_cast<size_t>(entry.end - entry.begin), 'x');
    write_file_durably(directory_ / file, bytes);
  }

  static SafetensorsEntry entry(const std::string& name, std::vector<int64_t> shape) {
    return {.name = name, .dtype = DType::kFloat32, .shape = std::move(shape)};
  }

  void write_index(const std::string& weight_map, const std::string& name = "model") {
    write_file_durably(directory_ / (name + ".safetensors.index.json"),
                       concat("{\"weight_map\": ", weight_map, "}"));
  }

  template <typename Matcher>
  void expect_refusal(const Matcher& words) {
    EXPECT_THAT([&] { TensorCatalog catalog(directory_.path()); }, ThrowsMessage<Error>(words));
  }

  testing::TempDir directory_{testing::TempDir::On::kMemory};
};

TEST_F(PlainFiles, AreReadAloneAndTogether) {
  write("a.safetensors", {entry("w", {2, 3})});
  write("b.safetensors", {entry("v", {}), entry("none", {0, 4})});
  EXPECT_EQ(TensorCatalog(directory_ / "a.safetensors").model().size(), 1u);
  EXPECT_EQ(TensorCatalog(directory_.path()).model().size(), 3u);
}

TEST_F(PlainFiles, OfAnIndexAreTheOnlyOnesThatCount) {
  write("a.safetensors", {entry("w", {2})});
  write("b.safetensors", {entry("w", {2})});
  write_index(R"({"w": "b.safetensors"})");
  EXPECT_EQ(TensorCatalog(directory_.path()).model().at("w").boxes.size(), 1u);
}

// Models are published in several formats at once.
TEST_F(PlainFiles, OfAnIndexOfAnotherFormatDoNotCount) {
  write("model.safetensors", {entry("w", {2})});
  write_file_durably(directory_ / "pytorch_model.bin.index.json",
                     R"({"weight_map": {"w": "pytorch_model-00001-of-00002.bin"}})");
  EXPECT_EQ(TensorCatalog(directory_.path()).model().size(), 1u);
}

TEST_F(PlainFiles, OutsideTheDirectoryAreNotOpened) {
  write("a.safetensors", {entry("w", {2})});
  for (const char* name : {"../a.safetensors", "/etc/passwd", "x/a.safetensors", "..", ".", "",
                           "a\\\\b", "a\\nb", "a.safetensors\\u0000b"}) {
    write_index(concat("{\"w\": \"", name, "\"}"));
    expect_refusal(AllOf(HasSubstr("index.json"), HasSubstr("'w' is no plain file name")));
  }
}

TEST_F(PlainFiles, OfAnIndexThatIsNoneAreNotGuessed) {
  write("a.safetensors", {entry("w", {2})});
  for (const char* map : {"[]", "3", "null"}) {
    write_index(map);
    expect_refusal(AllOf(HasSubstr("index.json"), HasSubstr("has no weight_map")));
  }
  write_index(R"({"w": 3})");
  expect_refusal(HasSubstr("'w' is no plain file name"));
  write_file_durably(directory_ / "model.safetensors.index.json", "[1]");
  expect_refusal(HasSubstr("has no weight_map"));
}

TEST_F(PlainFiles, ThatAnIndexNamesMustBeThere) {
  write_index(R"({"w": "a.safetensors"})");
  expect_refusal(HasSubstr("a.safetensors"));
}

TEST_F(PlainFiles, WithATensorTwiceAreRefused) {
  write("a.safetensors", {entry("w", {2})});
  write("b.safetensors", {entry("w", {2})});
  expect_refusal(AllOf(HasSubstr(directory_.path()), HasSubstr("'w (two parts of it overlap)'")));
}

TEST_F(PlainFiles, WithoutTensorsAreRefusedWithWhatToGive) {
  expect_refusal(HasSubstr("give a checkpoint"));
  EXPECT_THAT([&] { TensorCatalog catalog(directory_ / "nothing"); },
              ThrowsMessage<Error>(HasSubstr("does not exist")));
}

// The shape is as far as parts reach: it must not be believed before it is covered.
TEST_F(PlainFiles, ThatReachBeyondAnyTensorAreRefused) {
  for (const char* offsets : {"[4611686018427387900, 4611686018427387900]", "[1000000000, 4]",
                              "[4611686018427387900, 0]"}) {
    write("a.safetensors", {entry("w", {1, 1})},
          concat("{\"w\": {\"saved_offsets\": ", offsets, "}}"));
    expect_refusal(AllOf(HasSubstr(directory_.path()), HasSubstr("'w (only 1 of its ")));
  }
}

TEST_F(PlainFiles, WithSizesBesideAZeroAreRead) {
  const int64_t huge = INT64_MAX;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{huge, huge, 0}, {0, huge, huge}, {huge, 0, huge}}) {
    write("a.safetensors", {entry("w", shape), entry("v", {2})});
    EXPECT_EQ(TensorCatalog(directory_.path()).model().at("w").tensor.shape, shape);
  }
  write("a.safetensors", {entry("w", {huge, 0})}, R"({"w": {"saved_offsets": [1, 0]}})");
  expect_refusal(AllOf(HasSubstr("a.safetensors"), HasSubstr("'w'")));
}

}  // namespace
}  // namespace fsdp::plain_files_test
