// A figure over the steps of a run, in bounded memory whatever their number.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::train {

// The values of some neighbouring steps.
struct SeriesBucket {
  int64_t first_step = 0;
  int64_t last_step = 0;
  int64_t count = 0;  // finite values
  double sum = 0;
  double min = 0;
  double max = 0;
  int64_t num_nonfinite = 0;  // in none of the above

  bool is_empty() const { return count == 0; }
  double mean() const { return sum / static_cast<double>(count); }
  double middle_step() const { return static_cast<double>(first_step + last_step) / 2; }

  // Takes in the values of the bucket after it.
  void join(const SeriesBucket& next);
};

// Keeps every value while they are few; then means, minima and maxima over 2, 4, 8, ... steps.
class Series {
 public:
  // Steps do not decrease.
  void add(int64_t step, double value);

  std::span<const SeriesBucket> buckets() const { return buckets_; }
  bool is_empty() const { return buckets_.empty(); }

  // In at most `max_buckets` (> 0) ones.
  std::vector<SeriesBucket> coarse(size_t max_buckets) const;

 private:
  std::vector<SeriesBucket> buckets_;
  int64_t stride_ = 1;  // steps that share a bucket
};

// Means over neighbours on both sides, as many on one as on the other, so that a trend is not
// shifted; fewer near the ends. Empty buckets count for nothing and get the value before them.
std::vector<double> smoothed_means(std::span<const SeriesBucket> buckets);

}  // namespace fsdp::train
