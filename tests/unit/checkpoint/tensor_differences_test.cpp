// Two checkpoints compared: missing tensors, other shapes and types, other numbers.
#include "fsdp/checkpoint/tools/tensor_numbers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::tensor_differences_test {
namespace {

using ::testing::IsEmpty;

class TensorDifferences : public ::testing::Test {
 protected:
  std::vector<TensorDifference> compare(const std::vector<WholeTensor>& first,
                                        const std::vector<WholeTensor>& second) {
    write_plain_file(directory_ / "plain.safetensors", first);
    const std::string cut = directory_ / ("cut" + std::to_string(num_++));
    write_checkpoint(cut, {.model = second}, {.ranks = 3});
    const TensorCatalog a(directory_ / "plain.safetensors");
    const TensorCatalog b(cut);
    int64_t bytes = 0;
    const auto differences = differences_of({a.model(), a.files()}, {b.model(), b.files()},
                                            [&](int64_t more) { bytes += more; });
    EXPECT_EQ(bytes, bytes_to_compare(a.model(), b.model()));
    return differences;
  }

  TempDir directory_;
  int num_ = 0;
};

TEST_F(TensorDifferences, SeesNoneHoweverFilesAreCut) {
  const std::vector<WholeTensor> tensors = {counting("w", {7, 5}), floats("scalar", {}, {2.5f}),
                                            floats("empty", {0, 4}, {}),
                                            floats("nan", {2}, {NAN, -0.0f})};
  EXPECT_THAT(compare(tensors, tensors), IsEmpty());
}

TEST_F(TensorDifferences, NamesWhatOnlyOneHasAndOtherShapes) {
  const auto differences = compare({counting("a", {2}), counting("w", {6})},
                                   {counting("b", {2}), counting("w", {3, 2})});
  ASSERT_EQ(differences.size(), 3u);
  EXPECT_EQ(differences[0].name, "a");
  EXPECT_FALSE(differences[0].second.has_value());
  EXPECT_EQ(differences[1].name, "b");
  EXPECT_FALSE(differences[1].first.has_value());
  EXPECT_TRUE(differences[2].has_other_shape());
  EXPECT_EQ(differences[2].num_different, 0);
}

TEST_F(TensorDifferences, CountsElementsAndMeasuresTheLargestDifference) {
  const auto differences = compare({floats("w", {2, 3}, {1, 2, 3, 4, 5, 6})},
                                   {floats("w", {2, 3}, {1, 2.5, 3, 4, 2, 6})});
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0].num_different, 2);
  EXPECT_EQ(differences[0].max_difference, 3);
}

TEST_F(TensorDifferences, ComparesBitsOfOneTypeAndNumbersOfTwo) {
  auto differences = compare({floats("w", {2}, {0.0f, NAN})}, {floats("w", {2}, {-0.0f, NAN})});
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0].num_different, 1);
  EXPECT_EQ(differences[0].max_difference, 0);

  const std::vector<uint16_t> codes = {0x8000, 0x7FC0, 0x3F80, 0x7F80};
  differences = compare({floats("w", {4}, {0.0f, NAN, 1.5f, INFINITY})},
                        {whole_tensor("w", {4}, codes, DType::kBFloat16)});
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_TRUE(differences[0].has_other_dtype());
  EXPECT_EQ(differences[0].num_different, 1);
  EXPECT_EQ(differences[0].max_difference, 0.5);
}

TEST_F(TensorDifferences, IsNanWhereOneIsNanWhateverComesAfter) {
  const auto differences =
      compare({floats("w", {3}, {1, NAN, 3})}, {floats("w", {3}, {2, 2, 300})});
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0].num_different, 3);
  EXPECT_TRUE(std::isnan(differences[0].max_difference));
  EXPECT_EQ(compare({floats("w", {1}, {INFINITY})}, {floats("w", {1}, {1})})[0].max_difference,
            INFINITY);
}

}  // namespace
}  // namespace fsdp::testing::tensor_differences_test
