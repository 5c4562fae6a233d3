// Which stored tensors become a model's weights, and the errors if they do not fit it.
#include "fsdp/checkpoint/tools/weight_selection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::weight_selection_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> names_of(const std::vector<CatalogTensor>& tensors) {
  std::vector<std::string> names;
  for (const CatalogTensor& tensor : tensors) names.push_back(tensor.tensor.name);
  return names;
}

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
}  // namespace fsdp::testing::weight_selection_test
