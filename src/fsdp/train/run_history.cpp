#include "fsdp/train/run_history.h"

#include <cmath>

#include "fsdp/train/outliers.h"

namespace fsdp::train {

namespace {

constexpr size_t kMaxRows = 50;  // of a table

template <typename Record>
void keep_newest(std::deque<Record>& records, const Record& record) {
  records.push_back(record);
  if (records.size() > kMaxRows) records.pop_front();
}

}  // namespace

void RunHistory::restore(const LogRecord& record) {
  std::visit([this](const auto& each) { add(each); }, record);
}

void RunHistory::add(const StepRecord& record) {
  loss_.add(record.step, record.loss);
  learning_rate_.add(record.step, record.learning_rate);
  gradient_norm_.add(record.step, record.gradient_norm);
  tokens_per_second_.add(record.step, record.tokens_per_second);
  milliseconds_.add(record.step, record.milliseconds);
  last_step_ = record;
  step_seconds_ += std::isfinite(record.milliseconds) ? record.milliseconds / 1000 : 0;
  num_skipped_ += record.is_skipped ? 1 : 0;
  if (std::abs(record.loss_z) >= kOutlierZ) {
    ++num_outliers_;
    keep_newest(outliers_, record);
  }
}

void RunHistory::add(const ValidationRecord& record) {
  validation_loss_.add(record.step, record.loss);
  if (!best_validation_ || record.loss < best_validation_->loss) best_validation_ = record;
}

void RunHistory::add(const CheckpointRecord& record) {
  ++num_checkpoints_;
  keep_newest(checkpoints_, record);
}

void RunHistory::add(const RunStart& start) {
  end_.reset();
  if (start.resumed_step > 0) keep_newest(resumed_steps_, start.resumed_step);
}

}  // namespace fsdp::train
