// What can be said of a tensor's numbers without showing them: range, mean, spread, a histogram.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/tensor_stream.h"

namespace fsdp {

struct TensorStatistics {
  static constexpr size_t kNumBins = 32;

  int64_t numel = 0;
  int64_t num_nan = 0;
  int64_t num_inf = 0;
  // Of the finite numbers; all 0 where there are none.
  double min = 0.0;
  double max = 0.0;
  double mean = 0.0;
  double deviation = 0.0;  // standard, of all of them: divided by their number
  // How many lie in each of the equal parts of [min, max].
  std::array<int64_t, kNumBins> bins = {};

  int64_t num_finite() const { return numel - num_nan - num_inf; }
};

// Sees every number once and keeps none, so the histogram is counted before min and max are known:
// by the upper half of a number's fp32 bits (sign, exponent, 7 bits of mantissa), and put together
// in the end. A number may appear in a bin beside its own where it is within 1/256 of the border.
class StatisticsCollector {
 public:
  StatisticsCollector();

  void add(std::span<const double> values);
  // Of all since the last call; then it begins anew. Costs as much as there were different numbers,
  // so that many small tensors are quick.
  TensorStatistics finish();

 private:
  TensorStatistics so_far_;
  double squares_ = 0.0;         // of distances from the mean
  std::vector<int64_t> counts_;  // by the upper 16 bits as fp32
  std::vector<size_t> counted_;  // where they are above 0
};

TensorStatistics statistics_of(std::span<const CheckedFile> files, const CatalogTensor& tensor,
                               StatisticsCollector& collector, const OnBytes& on_bytes = {});

// A character per bin, from ' ' for none to '@' for the fullest.
std::string histogram_text(const TensorStatistics& statistics);

}  // namespace fsdp
