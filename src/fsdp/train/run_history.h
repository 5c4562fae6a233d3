// All that a report tells of a run's steps, in bounded memory, over resumes.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "fsdp/train/log_lines.h"
#include "fsdp/train/series.h"
#include "fsdp/train/step_record.h"

namespace fsdp::train {

class RunHistory {
 public:
  // As read from the log of the part before a resume, in its order.
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
