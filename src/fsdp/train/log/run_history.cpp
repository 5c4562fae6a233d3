#include "fsdp/train/log/run_history.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/train/settings/settings.h"

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

// The value at a step of the line that fits the values best, by least squares; `otherwise` without
// values. In the middle of even steps it is their mean.
double fitted_value(std::span<const SeriesBucket> buckets, double step, double otherwise) {
  double count = 0;
  double value = 0;
  double x = 0;  // steps from the one asked for
  double xx = 0;
  double xv = 0;
  for (const SeriesBucket& bucket : buckets) {
    const auto weight = static_cast<double>(bucket.count);
    const double at = bucket.middle_step() - step;
    count += weight;
    value += bucket.sum;
    x += weight * at;
    xx += weight * at * at;
    xv += bucket.sum * at;
  }
  if (count == 0) return otherwise;
  const double spread = count * xx - x * x;
  return spread > 0 ? (xx * value - x * xv) / spread : value / count;
}

constexpr int64_t kFirstSteps = 20;
// A weight counts about the last 2 / weight - 1 losses: 19 for the level, which follows the falling
// loss of the first hundreds of steps, 49 for the deviation, and 99 for the slope, the noisiest of
// the three.
constexpr double kLevelWeight = 0.1;
constexpr double kSlopeWeight = 0.02;
constexpr double kVarianceWeight = 0.04;
// Keeps rounding from making an outlier of one among equal losses, which have no deviation.
constexpr double kLeastDeviation = 1e-6;

constexpr size_t kMaxRows = 50;  // of a table

template <typename Record>
void keep_newest(std::deque<Record>& records, const Record& record) {
  records.push_back(record);
  if (records.size() > kMaxRows) records.pop_front();
}

// The log has settings by name alone; their table has groups and an order. Settings of another
// version come last.
void put_in_order(std::vector<SettingRow>& rows) {
  const std::vector<Setting> known = settings();
  const auto find = [&](const std::string& name) {
    return std::find_if(known.begin(), known.end(),
                        [&](const Setting& setting) { return name == setting.name; });
  };
  for (SettingRow& row : rows) {
    const auto setting = find(row.name);
    row.group = setting == known.end() ? "others" : setting->group;
    row.help = setting == known.end() ? "" : setting->help;
  }
  std::stable_sort(rows.begin(), rows.end(), [&](const SettingRow& a, const SettingRow& b) {
    return find(a.name) < find(b.name);
  });
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

SeriesBucket Series::recent() const {
  const std::span<const SeriesBucket> last =
      buckets().last(std::min(buckets_.size(), 1 + buckets_.size() / 100));
  if (last.empty()) return {};
  SeriesBucket joined = last.front();
  for (const SeriesBucket& bucket : last.subspan(1)) joined.join(bucket);
  return joined;
}

double Series::median(Middle of_two) const {
  std::vector<double> means;
  for (const SeriesBucket& bucket : buckets_)
    if (!bucket.is_empty()) means.push_back(bucket.mean());
  if (means.empty()) return NAN;
  const size_t after = of_two == Middle::kUpper ? means.size() : means.size() - 1;
  const auto middle = means.begin() + static_cast<std::ptrdiff_t>(after / 2);
  std::nth_element(means.begin(), middle, means.end());
  return *middle;
}

std::vector<double> smoothed_means(std::span<const SeriesBucket> buckets) {
  const size_t size = buckets.size();
  const size_t reach = size / 40;  // a fortieth of the run to each side
  std::vector<double> result;
  for (size_t i = 0; i < size; ++i) {
    const size_t near = std::min(reach, i);
    const size_t end = std::min(size, i + near + 1);
    // The last windows are as long as the others, but not even on both sides.
    const size_t length = std::min(end, 2 * near + 1);
    const double before = result.empty() ? 0 : result.back();
    result.push_back(
        fitted_value(buckets.subspan(end - length, length), buckets[i].middle_step(), before));
  }
  return result;
}

double LossOutliers::add(double loss) {
  if (!std::isfinite(loss)) return 0;
  ++num_losses_;
  if (num_losses_ == 1) {
    level_ = loss;
    return 0;
  }
  const double expected = level_ + slope_;
  const double deviation = std::max(std::sqrt(variance_), kLeastDeviation * std::abs(level_));
  double residual = loss - expected;
  const bool is_early = num_losses_ <= kFirstSteps;
  const double z = is_early || deviation == 0 ? 0 : residual / deviation;
  if (!is_early) residual = std::clamp(residual, -kOutlierZ * deviation, kOutlierZ * deviation);

  // The first losses weigh alike, as long as they are few.
  const double fair = 1.0 / static_cast<double>(num_losses_);
  const double old_level = level_;
  level_ = expected + std::max(kLevelWeight, fair) * residual;
  slope_ += std::max(kSlopeWeight, fair) * (level_ - old_level - slope_);
  variance_ += std::max(kVarianceWeight, fair) * (residual * residual - variance_);
  return z;
}

void RunHistory::add(const LogRecord& record) {
  std::visit([this](const auto& each) { add(each); }, record);
}

void RunHistory::add(const StepRecord& record) {
  loss.add(record.step, record.loss);
  learning_rate.add(record.step, record.learning_rate);
  gradient_norm.add(record.step, record.gradient_norm);
  tokens_per_second.add(record.step, record.tokens_per_second);
  milliseconds.add(record.step, record.milliseconds);
  tokens.add(record.step, static_cast<double>(record.tokens));
  last_step = record;
  step_seconds += std::isfinite(record.milliseconds) ? record.milliseconds / 1000 : 0;
  num_skipped += record.is_skipped ? 1 : 0;
  if (std::abs(record.loss_z) >= kOutlierZ) {
    ++num_outliers;
    keep_newest(outliers, record);
  }
}

void RunHistory::add(const ValidationRecord& record) {
  validation_loss.add(record.step, record.loss);
  if (!best_validation || record.loss < best_validation->loss) best_validation = record;
}

void RunHistory::add(const CheckpointRecord& record) {
  ++num_checkpoints;
  keep_newest(checkpoints, record);
}

void RunHistory::add(const RunFacts& start) {
  end.reset();
  if (start.resumed_step > 0) keep_newest(resumed_steps, start.resumed_step);
}

LoggedRun read_logged_run(const std::string& path) {
  std::string name = path;
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  const std::string log = is_directory(name) ? name + "/log.jsonl" : name;
  FSDP_CHECK(path_exists(log) && !is_directory(log), log,
             ": there is no log; give the directory of a run (fsdp train --checkpoint-dir) or the "
             "file of its --log");
  LoggedRun run{.name = name};
  for (const LogRecord& record : read_log(log)) {
    run.history.add(record);
    if (const auto* start = std::get_if<RunFacts>(&record)) run.facts = *start;
  }
  FSDP_CHECK(run.history.last_step, log,
             ": has no step of a run; wait for its first one, or give the log of another run");
  put_in_order(run.facts.settings);
  return run;
}

}  // namespace fsdp::train
