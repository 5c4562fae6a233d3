#include "fsdp/checkpoint/tensor_statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "fsdp/checkpoint/tensor_values.h"

namespace fsdp {

namespace {

constexpr size_t kNumCounts = size_t{1} << 16;

size_t count_index(double value) {
  constexpr double kMost = std::numeric_limits<float>::max();
  const auto narrow = static_cast<float>(std::clamp(value, -kMost, kMost));
  return std::bit_cast<uint32_t>(narrow) >> 16;
}

// The middle of the numbers that are counted together.
double middle_of(size_t index) {
  return std::bit_cast<float>(static_cast<uint32_t>(index) << 16 | 0x8000u);
}

}  // namespace

StatisticsCollector::StatisticsCollector() : counts_(kNumCounts, 0) {}

void StatisticsCollector::add(std::span<const double> values) {
  int64_t count = 0;
  double sum = 0.0;
  double min = so_far_.min;
  double max = so_far_.max;
  const bool is_first = so_far_.num_finite() == 0;
  so_far_.numel += static_cast<int64_t>(values.size());
  for (const double value : values) {
    if (std::isnan(value)) {
      ++so_far_.num_nan;
    } else if (std::isinf(value)) {
      ++so_far_.num_inf;
    } else {
      min = is_first && count == 0 ? value : std::min(min, value);
      max = is_first && count == 0 ? value : std::max(max, value);
      sum += value;
      ++count;
      const size_t index = count_index(value);
      if (counts_[index]++ == 0) counted_.push_back(index);
    }
  }
  if (count == 0) return;
  so_far_.min = min;
  so_far_.max = max;
  // The distances of these numbers from their own mean, then both parts together: no difference of
  // two large sums, which would lose the digits of small spreads.
  const double mean = sum / static_cast<double>(count);
  double squares = 0.0;
  for (const double value : values)
    if (std::isfinite(value)) squares += (value - mean) * (value - mean);
  const auto all = static_cast<double>(so_far_.num_finite());
  const double before = all - static_cast<double>(count);
  const double distance = mean - so_far_.mean;
  so_far_.mean += distance * static_cast<double>(count) / all;
  squares_ += squares + distance * distance * before * static_cast<double>(count) / all;
}

TensorStatistics StatisticsCollector::finish() {
  TensorStatistics statistics = std::exchange(so_far_, {});
  const double squares = std::exchange(squares_, 0.0);
  if (statistics.num_finite() == 0) return statistics;
  statistics.deviation = std::sqrt(squares / static_cast<double>(statistics.num_finite()));
  // Halves: the difference of the largest numbers of fp64 would not be finite.
  const double width = statistics.max / 2 - statistics.min / 2;
  for (const size_t i : std::exchange(counted_, {})) {
    const double value = std::clamp(middle_of(i), statistics.min, statistics.max);
    const double place = width > 0.0 ? (value / 2 - statistics.min / 2) / width : 0.5;
    const auto bin = static_cast<size_t>(place * static_cast<double>(TensorStatistics::kNumBins));
    statistics.bins[std::min(bin, TensorStatistics::kNumBins - 1)] += std::exchange(counts_[i], 0);
  }
  return statistics;
}

TensorStatistics statistics_of(std::span<const CheckedFile> files, const CatalogTensor& tensor,
                               StatisticsCollector& collector, const OnBytes& on_bytes) {
  const DType dtype = tensor.tensor.dtype;
  std::vector<std::byte> bytes;
  std::vector<double> values;
  // By the width of a double, which is what a chunk becomes.
  for_each_chunk(numel_of(tensor.tensor), sizeof(double), [&](FlatRange range) {
    values.resize(static_cast<size_t>(range.numel()));
    bytes.resize(static_cast<size_t>(range.numel() * element_bytes(dtype)));
    read_elements(files, tensor, range, bytes.data());
    read_values(dtype, bytes, values);
    collector.add(values);
    if (on_bytes) on_bytes(static_cast<int64_t>(bytes.size()));
  });
  return collector.finish();
}

std::string histogram_text(const TensorStatistics& statistics) {
  constexpr std::string_view kLevels = ".:-=+*#%@";
  const int64_t most = *std::max_element(statistics.bins.begin(), statistics.bins.end());
  std::string text;
  for (const int64_t count : statistics.bins) {
    const double share = most == 0 ? 0.0 : static_cast<double>(count) / static_cast<double>(most);
    const auto level = static_cast<size_t>(share * static_cast<double>(kLevels.size()));
    text.push_back(count == 0 ? ' ' : kLevels[std::min(level, kLevels.size() - 1)]);
  }
  return text;
}

}  // namespace fsdp
