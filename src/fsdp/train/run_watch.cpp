#include "fsdp/train/run_watch.h"

#include <chrono>
#include <limits>
#include <utility>

namespace fsdp::train {

namespace {

double seconds_since_1970() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

RunWatch::RunWatch(WatchOptions options, RunFacts facts, std::ostream& out)
    : options_(std::move(options)), facts_(std::move(facts)), console_(options_.console, out) {
  if (!options_.log_path.empty()) {
    log_.emplace(options_.log_path, facts_.resumed_step,
                 [this](const LogRecord& record) { restore(record); });
    log_->write(run_line(facts_, seconds_since_1970()));
  }
  console_.begin(facts_);
}

void RunWatch::restore(const LogRecord& record) {
  if (const auto* step = std::get_if<StepRecord>(&record)) outliers_.add(step->loss);
  if (const auto* validation = std::get_if<ValidationRecord>(&record)) remember(*validation);
}

void RunWatch::remember(const ValidationRecord& record) {
  if (!best_validation_ || record.loss < best_validation_->loss) best_validation_ = record;
}

void RunWatch::step(StepRecord record) {
  record.loss_z = outliers_.add(record.loss);
  if (log_) log_->write(log_line_of(record, seconds_since_1970()));
  console_.step(record);
}

void RunWatch::validation(const ValidationRecord& record) {
  if (log_) log_->write(log_line_of(record, seconds_since_1970()));
  console_.validation(
      record, best_validation_ ? best_validation_->loss : std::numeric_limits<double>::infinity());
  remember(record);
}

void RunWatch::checkpoint(const CheckpointRecord& record) {
  if (log_) log_->write(log_line_of(record, seconds_since_1970()));
  console_.checkpoint(record);
}

void RunWatch::memory(std::vector<MemoryRow> rows) { facts_.memory = std::move(rows); }

void RunWatch::timeline(std::vector<TimelineSpan> spans) { static_cast<void>(spans); }

void RunWatch::sample(TextSample sample) { console_.sample(sample); }

void RunWatch::end(const EndRecord& record) {
  if (log_) log_->write(log_line_of(record, seconds_since_1970()));
  console_.end(record, best_validation_, options_.report_path);
}

}  // namespace fsdp::train
