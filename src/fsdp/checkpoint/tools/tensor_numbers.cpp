#include "fsdp/checkpoint/tools/tensor_numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "fsdp/checkpoint/format/tensor_stream.h"

namespace fsdp {

namespace {

constexpr size_t kNumCounts = size_t{1} << 16;

size_t count_index(double value) {
  constexpr double kMost = std::numeric_limits<float>::max();
  const auto narrow = static_cast<float>(std::clamp(value, -kMost, kMost));
  return std::bit_cast<uint32_t>(narrow) >> 16;
}

// The middle of the numbers that share this count.
double middle_of(size_t index) {
  return std::bit_cast<float>(static_cast<uint32_t>(index) << 16 | 0x8000u);
}

// Compares two tensors of one shape, chunk by chunk.
class ElementComparison {
 public:
  ElementComparison(const StoredTensor& first, const StoredTensor& second)
      : first_dtype_(first.dtype), second_dtype_(second.dtype) {}

  void add(std::span<const std::byte> first, std::span<const std::byte> second,
           TensorDifference& difference) {
    const bool is_one_type = first_dtype_ == second_dtype_;
    if (is_one_type && std::memcmp(first.data(), second.data(), first.size()) == 0) return;
    const auto width = static_cast<size_t>(element_bytes(first_dtype_));
    const size_t numel = first.size() / width;
    first_values_.resize(numel);
    second_values_.resize(numel);
    read_values(first_dtype_, first, first_values_);
    read_values(second_dtype_, second, second_values_);
    for (size_t i = 0; i < numel; ++i) {
      const double a = first_values_[i];
      const double b = second_values_[i];
      const bool is_equal = is_one_type
                                ? std::memcmp(&first[i * width], &second[i * width], width) == 0
                                : a == b || (std::isnan(a) && std::isnan(b));
      if (is_equal) continue;
      ++difference.num_different;
      grow(difference.max_difference, a, b);
    }
  }

 private:
  static void grow(double& most, double a, double b) {
    if (std::isnan(a) && std::isnan(b)) return;  // with different bits
    if (a == b) return;                          // zeros of two signs; and Inf - Inf would be NaN
    const double distance = std::abs(a - b);
    if (std::isnan(distance) || distance > most) most = distance;  // NaN stays
  }

  const DType first_dtype_;
  const DType second_dtype_;
  std::vector<double> first_values_;
  std::vector<double> second_values_;
};

void compare_values(const TensorsInFiles& first, const TensorsInFiles& second,
                    TensorDifference& difference, const OnBytes& on_bytes) {
  const CatalogTensor& a = first.tensors.at(difference.name);
  const CatalogTensor& b = second.tensors.at(difference.name);
  ElementComparison comparison(a.tensor, b.tensor);
  std::vector<std::byte> first_bytes;
  std::vector<std::byte> second_bytes;
  // In doubles, because differing chunks are converted to them.
  for_each_chunk(numel_of(a.tensor), sizeof(double), [&](FlatRange range) {
    first_bytes.resize(static_cast<size_t>(range.numel() * element_bytes(a.tensor.dtype)));
    second_bytes.resize(static_cast<size_t>(range.numel() * element_bytes(b.tensor.dtype)));
    read_elements(first.files, a, range, first_bytes.data());
    read_elements(second.files, b, range, second_bytes.data());
    comparison.add(first_bytes, second_bytes, difference);
    if (on_bytes) on_bytes(static_cast<int64_t>(first_bytes.size() + second_bytes.size()));
  });
}

bool can_be_compared(const StoredTensor& a, const StoredTensor& b) { return a.shape == b.shape; }

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
  // Adds squared distances from the mean, not differences of two large sums, which would lose the
  // digits of small spreads.
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

TensorStatistics StatisticsCollector::take() {
  TensorStatistics statistics = std::exchange(so_far_, {});
  const double squares = std::exchange(squares_, 0.0);
  if (statistics.num_finite() == 0) return statistics;
  statistics.deviation = std::sqrt(squares / static_cast<double>(statistics.num_finite()));
  // Halves, because the difference of fp64's largest numbers would not be finite.
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
  // In doubles, because each chunk is converted to them.
  for_each_chunk(numel_of(tensor.tensor), sizeof(double), [&](FlatRange range) {
    values.resize(static_cast<size_t>(range.numel()));
    bytes.resize(static_cast<size_t>(range.numel() * element_bytes(dtype)));
    read_elements(files, tensor, range, bytes.data());
    read_values(dtype, bytes, values);
    collector.add(values);
    if (on_bytes) on_bytes(static_cast<int64_t>(bytes.size()));
  });
  return collector.take();
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

std::vector<TensorDifference> differences_of(const TensorsInFiles& first,
                                             const TensorsInFiles& second,
                                             const OnBytes& on_bytes) {
  std::vector<TensorDifference> differences;
  for (const auto& [name, tensor] : first.tensors) {
    TensorDifference difference{.name = name, .first = tensor.tensor};
    const auto other = second.tensors.find(name);
    if (other != second.tensors.end()) {
      difference.second = other->second.tensor;
      if (can_be_compared(*difference.first, *difference.second))
        compare_values(first, second, difference, on_bytes);
    }
    if (difference.is_only_in_one() || difference.has_other_shape() ||
        difference.has_other_dtype() || difference.num_different > 0)
      differences.push_back(std::move(difference));
  }
  for (const auto& [name, tensor] : second.tensors)
    if (first.tensors.count(name) == 0)
      differences.push_back({.name = name, .first = std::nullopt, .second = tensor.tensor});
  std::sort(differences.begin(), differences.end(),
            [](const TensorDifference& a, const TensorDifference& b) { return a.name < b.name; });
  return differences;
}

int64_t bytes_to_compare(const TensorSet& first, const TensorSet& second) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : first) {
    const auto other = second.find(name);
    if (other == second.end() || !can_be_compared(tensor.tensor, other->second.tensor)) continue;
    bytes += bytes_of(tensor.tensor) + bytes_of(other->second.tensor);
  }
  return bytes;
}

}  // namespace fsdp
