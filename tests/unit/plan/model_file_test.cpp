// plan/: models from JSON, and what each wrong field is answered with.
#include "fsdp/plan/load_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::model_file_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string refusal(std::string_view json) {
  try {
    parse_model(json, "m.json");
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ModelFile, ReadsAListOfUnits) {
  const ModelShape model = parse_model(
      R"({"name": "mine",
          "units": [{"name": "a", "tensors": [{"name": "w", "shape": [3, 5]},
                                              {"name": "s", "shape": [], "dtype": "fp32"}]},
                    {"name": "b", "tensors": [{"name": "v", "shape": [7]}]}],
          "uses": ["a", "b", "a"]})",
      "m.json");
  EXPECT_EQ(model.name, "mine");
  EXPECT_EQ(model.parameters(), 15 + 1 + 7);
  EXPECT_THAT(model.uses, ElementsAre(0, 1, 0));
  EXPECT_EQ(model.units[0].tensors[1].dtype, DType::kFloat32);
  EXPECT_EQ(model.units[0].tensors[0].dtype, std::nullopt);
}

TEST(ModelFile, UsesEachUnitOnceByDefault) {
  const ModelShape model = parse_model(
      R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [1]}]},
                    {"name": "b", "tensors": [{"name": "v", "shape": [1]}]}]})",
      "m.json");
  EXPECT_EQ(model.name, "m.json");
  EXPECT_THAT(model.uses, ElementsAre(0, 1));
}

struct BadText {
  const char* json;
  const char* says;
};

TEST(ModelFile, NamesFileFieldValueAndFix) {
  const std::vector<BadText> table = {
      {"", "not valid JSON, at line 1"},
      {"{", "not valid JSON, at line 1"},
      {"[1e999]", "not valid JSON, number overflow parsing '1e999'"},
      {"[]", "the document is []; it must be an object"},
      {"{}", "model_type is missing; give a config.json"},
      {R"({"model_type": "bert"})",
       "model_type is \"bert\"; known are deepseek_v3, llama, mistral"},
      {R"({"model_type": "llama"})", "vocab_size is missing; add it"},
      {R"({"model_type": "llama", "vocab_size": 0, "hidden_size": 8, "num_hidden_layers": 1,
           "num_attention_heads": 2, "intermediate_size": 8})",
       "vocab_size is 0; it must be a whole number from 1"},
      {R"({"units": {}})", "units is {}; it must be an array"},
      {R"({"units": []})", "has no units; give at least one"},
      {R"({"units": [3]})", "units[0] is 3; it must be an object"},
      {R"({"units": [{"tensors": []}]})", "units[0].name is missing; add it"},
      {R"({"units": [{"name": "a"}]})", "units[0].tensors is missing; add it"},
      {R"({"units": [{"name": "a", "tensors": []}]})", "unit 'a' has no tensors"},
      {R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [2, -1]}]}]})",
       "units[0].tensors[0].shape is [2,-1]; it must be a list of whole numbers"},
      {R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [1], "dtype": "half"}]}]})",
       "units[0].tensors[0].dtype is \"half\"; use one of fp64"},
      {R"({"units": [{"name": "a", "tensors": [{"name": "w", "shpae": [1]}]}]})",
       "units[0].tensors[0].shpae is not a known field; did you mean 'shape'?"},
      {R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [1]}]}], "uses": ["b"]})",
       "uses is [\"b\"]; \"b\" is not the name of a unit"},
      {R"({"units": [{"name": "a", "tensors": [{"name": "w", "shape": [1]},
                                              {"name": "w", "shape": [1]}]}]})",
       "tensor name 'w' appears twice"},
  };
  for (const BadText& bad : table)
    EXPECT_THAT(refusal(bad.json), AllOf(StartsWith("m.json: "), HasSubstr(bad.says),
                                         Not(HasSubstr("m.json: m.json"))))
        << bad.json;
}

TEST(ModelFile, DoesNotTakeAFolderOrNothingForAFile) {
  EXPECT_THROW(load_model("/no/such/file.json"), UsageError);
  EXPECT_THROW(load_model("/"), UsageError);
  EXPECT_EQ(load_model("llama-1b").name, "llama-1b");
}

TEST(ModelFile, ShowsNamesWithoutWhatTerminalsObey) {
  EXPECT_THAT(refusal(R"({"units": [{"name": "a\u001b[2J\n", "tensors": []}]})"),
              HasSubstr(R"(unit 'a\x1b[2J\x0a' has no tensors)"));
}

TEST(ModelFile, HasAtMostSoManyUnits) {
  std::string units;
  for (int i = 0; i < 8193; ++i)
    units += R"({"name": "u)" + std::to_string(i) + R"(", "tensors": []},)";
  units.pop_back();
  EXPECT_EQ(
      refusal(R"({"units": [)" + units + "]}"),
      "m.json: units has 8193 entries; at most 8192 are supported, so join neighbouring units");
}

}  // namespace
}  // namespace fsdp::model_file_test
