// The history of a run over all its resumes, in bounded memory, for the report: figures over the
// steps, and outliers among the losses; and a run as its log tells it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
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
  // The value of a typical step; not finite without a finite value. A step that is in the middle by
  // its time is so by its speed if one takes the upper and the other the lower of two middle steps.
  enum class Middle { kLower, kUpper };
  double median(Middle of_two = Middle::kUpper) const;

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

// Filled by add(); for reading besides.
struct RunHistory {
  // A record of the log of the part before a resume, in its order.
  void add(const LogRecord& record);
  void add(const StepRecord& record);
  void add(const ValidationRecord& record);
  void add(const CheckpointRecord& record);
  void add(const EndRecord& record) { end = record; }
  // A part of the run begins.
  void add(const RunFacts& start);

  Series loss = {};
  Series validation_loss = {};
  Series learning_rate = {};
  Series gradient_norm = {};
  Series tokens_per_second = {};
  Series milliseconds = {};
  Series tokens = {};  // trained on by a step
  std::optional<StepRecord> last_step = {};
  std::optional<ValidationRecord> best_validation = {};

  // The newest ones, oldest first.
  std::deque<CheckpointRecord> checkpoints = {};
  std::deque<StepRecord> outliers = {};
  std::deque<int64_t> resumed_steps = {};  // after which the run was resumed

  int64_t num_checkpoints = 0;
  int64_t num_outliers = 0;
  int64_t num_skipped = 0;
  double step_seconds = 0;  // over all parts
  // How the newest part of the run ended; none while it goes on.
  std::optional<EndRecord> end = {};
};

// --- a run's log ---------------------------------------------------------------------------------

struct LoggedRun {
  std::string name = {};  // its directory or log, as given
  RunFacts facts = {};    // of its newest part; no memory
  RunHistory history = {};
};

// From a log, or from the directory of a run, whose log is log.jsonl. Throws an Error for a place
// without a log or a log without a step.
LoggedRun read_logged_run(const std::string& path);

}  // namespace fsdp::train
