#include "fsdp/train/series.h"

#include <algorithm>
#include <cmath>

namespace fsdp::train {

namespace {

// Twice as many points as a wide screen has columns; 110 kB.
constexpr size_t kMaxBuckets = 2048;

SeriesBucket bucket_of(int64_t step, double value) {
  if (!std::isfinite(value)) return {.first_step = step, .last_step = step, .num_nonfinite = 1};
  return {.first_step = step,
          .last_step = step,
          .count = 1,
          .sum = value,
          .min = value,
          .max = value,
          .num_nonfinite = 0};
}

// Joins neighbours of the same stride.
void join_strides(std::vector<SeriesBucket>& buckets, int64_t stride) {
  size_t num_kept = 0;
  for (const SeriesBucket& bucket : buckets) {
    const bool joins =
        num_kept > 0 && buckets[num_kept - 1].first_step / stride == bucket.first_step / stride;
    if (joins)
      buckets[num_kept - 1].join(bucket);
    else
      buckets[num_kept++] = bucket;
  }
  buckets.resize(num_kept);
}

}  // namespace

void SeriesBucket::join(const SeriesBucket& next) {
  last_step = next.last_step;
  num_nonfinite += next.num_nonfinite;
  if (next.is_empty()) return;
  min = is_empty() ? next.min : std::min(min, next.min);
  max = is_empty() ? next.max : std::max(max, next.max);
  sum += next.sum;
  count += next.count;
}

void Series::add(int64_t step, double value) {
  const SeriesBucket bucket = bucket_of(step, value);
  if (!buckets_.empty() && buckets_.back().first_step / stride_ == step / stride_) {
    buckets_.back().join(bucket);
    return;
  }
  buckets_.push_back(bucket);
  while (buckets_.size() > kMaxBuckets) {
    stride_ *= 2;
    join_strides(buckets_, stride_);
  }
}

std::vector<SeriesBucket> Series::coarse(size_t max_buckets) const {
  std::vector<SeriesBucket> result = buckets_;
  for (int64_t stride = stride_; result.size() > max_buckets;) {
    stride *= 2;
    join_strides(result, stride);
  }
  return result;
}

std::vector<double> smoothed_means(std::span<const SeriesBucket> buckets) {
  const size_t size = buckets.size();
  std::vector<double> sums(size + 1, 0.0);
  std::vector<double> counts(size + 1, 0.0);
  for (size_t i = 0; i < size; ++i) {
    sums[i + 1] = sums[i] + buckets[i].sum;
    counts[i + 1] = counts[i] + static_cast<double>(buckets[i].count);
  }
  const size_t reach = size / 40;  // a fortieth of the run to each side
  std::vector<double> result(size, 0.0);
  for (size_t i = 0; i < size; ++i) {
    const size_t near = std::min({reach, i, size - 1 - i});
    const size_t begin = i - near;
    const size_t end = i + near + 1;
    const double count = counts[end] - counts[begin];
    const double before = i > 0 ? result[i - 1] : 0;
    result[i] = count > 0 ? (sums[end] - sums[begin]) / count : before;
  }
  return result;
}

}  // namespace fsdp::train
