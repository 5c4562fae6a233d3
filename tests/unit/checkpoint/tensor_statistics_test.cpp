// Statistics of numbers that are seen once and in parts.
#include "fsdp/checkpoint/tools/tensor_numbers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "support/stored_tensors.h"
#include "support/temp_dir.h"

namespace fsdp::tensor_statistics_test {
namespace {

TensorStatistics collect(const std::vector<double>& values, size_t part = 1000) {
  StatisticsCollector collector;
  for (size_t i = 0; i < values.size(); i += part)
    collector.add(std::span(values).subspan(i, std::min(part, values.size() - i)));
  return collector.take();
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

TEST(TensorStatistics, NeedsNoFiniteNumber) {
  const TensorStatistics s = collect({NAN, INFINITY});
  EXPECT_EQ(s.num_finite(), 0);
  EXPECT_EQ(s.max, 0);
  EXPECT_EQ(collect({}).numel, 0);
  EXPECT_EQ(histogram_text(s), std::string(TensorStatistics::kNumBins, ' '));
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

TEST(TensorStatistics, HasOneBinForOneNumberAndNoOverflowForTheLargest) {
  const TensorStatistics one = collect({3, 3, 3});
  EXPECT_EQ(one.bins[16], 3);
  EXPECT_EQ(one.deviation, 0);
  constexpr double kMost = std::numeric_limits<double>::max();
  const TensorStatistics wide = collect({-kMost, kMost});
  EXPECT_EQ(std::accumulate(wide.bins.begin(), wide.bins.end(), int64_t{0}), 2);
}

TEST(TensorStatistics, BeginAnewAfterTheEnd) {
  StatisticsCollector collector;
  const std::vector<double> first = {1, -2, NAN, 1000};
  const std::vector<double> second = {3, 4};
  collector.add(first);
  collector.take();
  EXPECT_EQ(collector.take().numel, 0);
  collector.add(second);
  const TensorStatistics s = collector.take();
  EXPECT_EQ(s.bins, collect(second).bins);
  EXPECT_EQ(s.mean, 3.5);
  EXPECT_EQ(s.deviation, 0.5);
  EXPECT_EQ(s.num_nan, 0);
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

}  // namespace
}  // namespace fsdp::tensor_statistics_test
