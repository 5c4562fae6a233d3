#include "fsdp/checkpoint/tensor_differences.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fsdp/checkpoint/tensor_values.h"

namespace fsdp {

namespace {

// Chunks of two tensors of one shape, side by side.
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
    if (std::isnan(a) && std::isnan(b)) return;  // of other bits
    if (a == b) return;                          // zeros of two signs; Inf - Inf would be NaN
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
  // By the width of a double, which is what differing chunks become.
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
