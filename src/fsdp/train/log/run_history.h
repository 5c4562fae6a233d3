// The history of a run over all its resumes, in bounded memory, for the report: figures over the
// steps, and outliers among the losses.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/train/log/json_log.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- a figure over steps -------------------------------------------------------------------------

// The values of some neighbouring steps.
struct SeriesBucket {
  int64_t first_step = 0;
  int64_t last_step = 0;
  int64_t count = 0;  // finite values
  double sum = 0;
  double min = 0;
  double max = 0;
  int64_t num_nonfinite = 0;  // not counted above

  bool is_empty() const { return count == 0; }
  double mean() const { return sum / static_cast<double>(count); }
  double middle_step() const { return static_cast<double>(first_step + last_step) / 2; }

  // Adds the values of the bucket that follows this one.
  void join(const SeriesBucket& next);
};

// Keeps every value while they are few; then means, minima and maxima over 2, 4, 8, ... steps.
class Series {
 public:
  // A step is never lower than the one before.
  void add(int64_t step, double value);

  std::span<const SeriesBucket> buckets() const { return buckets_; }
  bool is_empty() const { return buckets_.empty(); }

  // Joins neighbours until there are at most `max_buckets` (> 0).
  std::vector<SeriesBucket> coarse(size_t max_buckets) const;

  // The last hundredth of the steps, whose mean hardly depends on a single one.
  SeriesBucket recent() const;
  // Of a typical step; not finite without a finite value.
  double median() const;

 private:
  std::vector<SeriesBucket> buckets_;
  int64_t stride_ = 1;  // steps that share a bucket
};

// The line that fits a value and its neighbours best, at the value's step: their mean, where there
// are as many on one side as on the other. The first windows are shorter, because a run begins
// steeply; the last are as long as the others, or else the curve would end in the noise of the last
// step. An empty bucket without neighbours gets the value before it.
std::vector<double> smoothed_means(std::span<const SeriesBucket> buckets);

// --- unlike losses -------------------------------------------------------------------------------

// Predicts the next loss from the level and the slope of the recent ones, and measures its error in
// units of their deviation. An outlier hardly moves the prediction, so that a second one is still
// seen.
class LossOutliers {
 public:
  // The z-score of `loss` among the losses before it, to which it then adds it. 0 during the first
  // steps, which say nothing about deviations yet, and for a loss that is not finite (not added).
  double add(double loss);

 private:
  int64_t num_losses_ = 0;
  double level_ = 0;
  double slope_ = 0;
  double variance_ = 0;
};

// Steps beyond this are marked; losses that are pure noise exceed it once in some thousands.
constexpr double kOutlierZ = 4.0;

// --- all that is told ----------------------------------------------------------------------------

class RunHistory {
 public:
  // Adds a record of the log of the part before a resume, in its order.
  void restore(const LogRecord& record);

  void add(const StepRecord& record);
  void add(const ValidationRecord& record);
  void add(const CheckpointRecord& record);
  void add(const EndRecord& record) { end_ = record; }
  // A part of the run begins after this step.
  void add(const RunStart& start);

  const Series& loss() const { return loss_; }
  const Series& validation_loss() const { return validation_loss_; }
  const Series& learning_rate() const { return learning_rate_; }
  const Series& gradient_norm() const { return gradient_norm_; }
  const Series& tokens_per_second() const { return tokens_per_second_; }
  const Series& milliseconds() const { return milliseconds_; }
  // Trained on by a step.
  const Series& tokens() const { return tokens_; }

  const std::optional<StepRecord>& last_step() const { return last_step_; }
  const std::optional<ValidationRecord>& best_validation() const { return best_validation_; }

  // The newest ones, oldest first.
  const std::deque<CheckpointRecord>& checkpoints() const { return checkpoints_; }
  const std::deque<StepRecord>& outliers() const { return outliers_; }
  int64_t num_checkpoints() const { return num_checkpoints_; }
  int64_t num_outliers() const { return num_outliers_; }
  int64_t num_skipped() const { return num_skipped_; }

  // The steps after which the run was resumed.
  const std::deque<int64_t>& resumed_steps() const { return resumed_steps_; }
  // How the newest part of the run ended; none while it goes on.
  const std::optional<EndRecord>& end() const { return end_; }
  // Time in steps, over all parts.
  double step_seconds() const { return step_seconds_; }

 private:
  Series loss_;
  Series validation_loss_;
  Series learning_rate_;
  Series gradient_norm_;
  Series tokens_per_second_;
  Series milliseconds_;
  Series tokens_;
  std::optional<StepRecord> last_step_;
  std::optional<ValidationRecord> best_validation_;
  std::deque<CheckpointRecord> checkpoints_;
  std::deque<StepRecord> outliers_;
  int64_t num_checkpoints_ = 0;
  int64_t num_outliers_ = 0;
  int64_t num_skipped_ = 0;
  std::deque<int64_t> resumed_steps_;
  std::optional<EndRecord> end_;
  double step_seconds_ = 0;
};

}  // namespace fsdp::train
