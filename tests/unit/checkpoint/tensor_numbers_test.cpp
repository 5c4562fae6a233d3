// Statistics of numbers that are seen once and in parts.
#include "fsdp/checkpoint/tools/tensor_numbers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::testing::tensor_numbers_test {
namespace {

using ::testing::IsEmpty;

TensorStatistics collect(const std::vector<double>& values, size_t part = 1000) {
  StatisticsCollector collector;
  for (size_t i = 0; i < values.size(); i += part)
    collector.add(std::span(values).subspan(i, std::min(part, values.size() - i)));
  const TensorStatistics statistics = collector.take();
  EXPECT_EQ(collector.take().numel, 0) << "it begins anew";
  return statistics;
}

TEST(TensorStatistics, CountsMeasuresAndSkipsWhatIsNotFinite) {
  const TensorStatistics s = collect({2, NAN, -4, INFINITY, 5, -INFINITY, -INFINITY}, 2);
  EXPECT_EQ(s.numel, 7);
  EXPECT_EQ(s.num_nan, 1);
  EXPECT_EQ(s.num_inf, 3);
  EXPECT_EQ(s.min, -4);
  EXPECT_EQ(s.max, 5);
  EXPECT_DOUBLE_EQ(s.mean, 1);
  EXPECT_DOUBLE_EQ(s.deviation, std::sqrt((1 + 25 + 16) / 3.0));
}

TEST(TensorStatistics, IsTheSameInAnyParts) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(0.25, 2);
  std::vector<double> values(10000);
  for (double& value : values) value = normal(random);
  const TensorStatistics whole = collect(values, values.size());
  for (const size_t part : {1, 7, 999}) {
    const TensorStatistics s = collect(values, part);
    EXPECT_NEAR(s.mean, whole.mean, 1e-12);
    EXPECT_NEAR(s.deviation, whole.deviation, 1e-12);
    EXPECT_EQ(s.bins, whole.bins);
  }
  EXPECT_NEAR(whole.deviation, 2, 0.05);
}

TEST(TensorStatistics, KeepsTheDigitsOfASmallSpread) {
  std::vector<double> values;
  for (int i = 0; i < 10000; ++i) values.push_back(1e9 + i % 2);
  const TensorStatistics s = collect(values, 64);
  EXPECT_DOUBLE_EQ(s.mean, 1e9 + 0.5);
  EXPECT_NEAR(s.deviation, 0.5, 1e-9);
}

TEST(TensorStatistics, PutsNumbersIntoTheBinsOfTheirRange) {
  std::vector<double> values;
  for (int i = 0; i < 32; ++i)
    for (int k = 0; k <= i; ++k) values.push_back(i + 0.5);
  values.push_back(0);
  values.push_back(32);
  const TensorStatistics s = collect(values);
  for (int i = 0; i < 32; ++i)
    EXPECT_EQ(s.bins[static_cast<size_t>(i)], i + 1 + (i == 0 || i == 31)) << i;
  const std::string text = histogram_text(s);
  EXPECT_EQ(text.front(), '.');
  EXPECT_EQ(text.back(), '@');
  EXPECT_TRUE(std::is_sorted(s.bins.begin(), s.bins.end()));
}

TEST(TensorStatistics, HasBinsForNoNumberForOneAndForTheLargest) {
  const TensorStatistics none = collect({NAN, INFINITY});
  EXPECT_EQ(none.num_finite(), 0);
  EXPECT_EQ(none.max, 0);
  EXPECT_EQ(histogram_text(none), std::string(TensorStatistics::kNumBins, ' '));
  const TensorStatistics one = collect({3, 3, 3});
  EXPECT_EQ(one.bins[16], 3);
  EXPECT_EQ(one.deviation, 0);
  constexpr double kMost = std::numeric_limits<double>::max();
  const TensorStatistics wide = collect({-kMost, kMost});
  EXPECT_EQ(std::accumulate(wide.bins.begin(), wide.bins.end(), int64_t{0}), 2);
}

TEST(TensorStatistics, ReadsATensorInChunksFromSeveralFiles) {
  const testing::TempDir directory;
  const int64_t rows = 3000;  // 3000 x 1024 doubles are more than one chunk
  std::vector<float> values(static_cast<size_t>(rows * 1024));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 5);
  const std::string path = directory / "c";
  testing::write_checkpoint(path, {.model = {testing::floats("w", {rows, 1024}, values)}},
                            {.ranks = 3});
  const TensorCatalog catalog(path);
  int64_t bytes = 0;
  int num_calls = 0;
  StatisticsCollector collector;
  const TensorStatistics s =
      statistics_of(catalog.files(), catalog.model().at("w"), collector, [&](int64_t more) {
        bytes += more;
        ++num_calls;
      });
  EXPECT_EQ(s.numel, rows * 1024);
  EXPECT_NEAR(s.mean, 2, 1e-6);
  EXPECT_EQ(bytes, rows * 1024 * 4);
  EXPECT_EQ(num_calls, 2);
}

// --- tensor differences --------------------------------------------------------------------------

// Two checkpoints compared: missing tensors, other shapes and types, other numbers.

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
}  // namespace fsdp::testing::tensor_numbers_test
