// Figures of stored tensors: range, mean, spread and histogram of one tensor, and the differences
// of two checkpoints.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_stream.h"

namespace fsdp {

// --- statistics of a tensor ----------------------------------------------------------------------

struct TensorStatistics {
  static constexpr size_t kNumBins = 32;

  int64_t numel = 0;
  int64_t num_nan = 0;
  int64_t num_inf = 0;
  // Facts about the finite numbers; all 0 if there are none.
  double min = 0.0;
  double max = 0.0;
  double mean = 0.0;
  double deviation = 0.0;  // standard deviation of the population
  // The numbers in each of the equal parts of [min, max].
  std::array<int64_t, kNumBins> bins = {};

  int64_t num_finite() const { return numel - num_nan - num_inf; }
};

// Sees every number once and keeps none, so it counts the histogram before min and max are known:
// by the upper half of a number's fp32 bits (sign, exponent, 7 bits of mantissa), joined at the
// end. A number within 1/256 of a border may appear in the neighbouring bin.
class StatisticsCollector {
 public:
  StatisticsCollector();

  void add(std::span<const double> values);
  // The statistics of all numbers since the last call; then the collector begins anew. The cost
  // grows with the number of different values, so that many small tensors are quick.
  TensorStatistics take();

 private:
  TensorStatistics so_far_;
  double squares_ = 0.0;         // of distances from the mean
  std::vector<int64_t> counts_;  // by the upper 16 bits as fp32
  std::vector<size_t> counted_;  // indices of counts_ above 0
};

TensorStatistics statistics_of(std::span<const CheckedFile> files, const CatalogTensor& tensor,
                               StatisticsCollector& collector, const OnBytes& on_bytes = {});

// A character per bin, from ' ' for none to '@' for the fullest.
std::string histogram_text(const TensorStatistics& statistics);

// --- differences of two checkpoints --------------------------------------------------------------

// Tensors of one checkpoint, and the files they lie in.
struct TensorsInFiles {
  const TensorSet& tensors;
  std::span<const CheckedFile> files;
};

struct TensorDifference {
  std::string name;
  // nullopt: the checkpoint has no such tensor.
  std::optional<StoredTensor> first = std::nullopt;
  std::optional<StoredTensor> second = std::nullopt;
  // If both have it, in the same shape. With one dtype, elements are equal if all their bits are;
  // with two, if they are the same number (all NaN are).
  int64_t num_different = 0;
  // NaN where one is NaN and the other is a number.
  double max_difference = 0.0;

  bool is_only_in_one() const { return !first || !second; }
  bool has_other_shape() const { return !is_only_in_one() && first->shape != second->shape; }
  bool has_other_dtype() const { return !is_only_in_one() && first->dtype != second->dtype; }
};

// All differences, by name; reads every tensor that both have.
std::vector<TensorDifference> differences_of(const TensorsInFiles& first,
                                             const TensorsInFiles& second,
                                             const OnBytes& on_bytes = {});

// All bytes that differences_of() will report to on_bytes.
int64_t bytes_to_compare(const TensorSet& first, const TensorSet& second);

}  // namespace fsdp
