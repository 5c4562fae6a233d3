#include "fsdp/train/run_watch.h"

#include <chrono>
#include <limits>
#include <utility>
#include <variant>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/train/report/report_page.h"

namespace fsdp::train {

namespace {

double seconds_since_1970() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string files_text(const WatchOptions& watch, const std::string& trace) {
  std::vector<std::string> files;
  if (!watch.log_path.empty())
    files.push_back(concat("log ", watch.log_path, " (with every setting)"));
  if (!watch.report_path.empty()) files.push_back(concat("report ", watch.report_path));
  if (!trace.empty()) files.push_back(concat("trace ", trace));
  return join(files, ", ");
}

RunWatch::RunWatch(WatchOptions options, RunFacts facts, std::ostream& out)
    : options_(std::move(options)), facts_(std::move(facts)), console_(options_.console, out) {
  const double time = seconds_since_1970();
  if (!options_.log_path.empty()) {
    log_.emplace(options_.log_path, facts_.resumed_step, [this](const LogRecord& record) {
      history_.add(record);
      if (const auto* step = std::get_if<StepRecord>(&record)) outliers_.add(step->loss);
    });
  }
  if (!options_.wandb_project.empty()) {
    wandb_ =
        std::make_unique<PythonWorker>("wandb", concat("--log wandb:", options_.wandb_project));
    const PythonWorker::Message answer = wandb_->ask({{"action", "open_wandb"},
                                                      {"project", options_.wandb_project},
                                                      {"name", options_.wandb_name}});
    facts_.environment.push_back({"wandb", answer.head.at("place")});
  }
  keep(facts_, time);
  history_.add(facts_);
  if (!options_.tensorboard_dir.empty()) {
    events_.emplace(options_.tensorboard_dir, facts_.resumed_step, time);
    events_->settings(facts_.settings, facts_.resumed_step, time);
  }
  if (!options_.report_path.empty()) {
    report_.emplace(options_.report_path);
    write_report();
  }
  console_.begin(facts_);
  if (wandb_) console_.note(concat("Weights & Biases: ", facts_.environment.back().value));
}

void RunWatch::keep(const LogRecord& record, double time) {
  if (!log_ && !wandb_) return;
  const std::string line = log_line(record, time);
  if (log_) log_->write(line);
  tell_wandb([&] { wandb_->tell({{"action", "log_wandb"}}, line); });
}

void RunWatch::tell_wandb(const std::function<void()>& action) {
  if (!wandb_) return;
  try {
    action();
  } catch (const Error& error) {
    wandb_.reset();
    log(LogLevel::kWarning, "Weights & Biases gets nothing more: ", error.what(),
        "; training goes on without it");
  }
}

void RunWatch::step(StepRecord record) {
  const double time = seconds_since_1970();
  record.loss_z = outliers_.add(record.loss);
  history_.add(record);
  keep(record, time);
  if (events_) events_->step(record, time);
  console_.step(record);
  if (report_ && report_->is_due()) write_report();
}

void RunWatch::validation(const ValidationRecord& record) {
  const double time = seconds_since_1970();
  const auto& best = history_.best_validation;
  console_.validation(record, best ? best->loss : std::numeric_limits<double>::infinity());
  history_.add(record);
  keep(record, time);
  if (events_) events_->validation(record, time);
}

void RunWatch::checkpoint(const CheckpointRecord& record) {
  history_.add(record);
  keep(record, seconds_since_1970());
  console_.checkpoint(record);
}

void RunWatch::memory(std::vector<MemoryRow> rows) { facts_.memory = std::move(rows); }

void RunWatch::timeline(std::vector<TimelineSpan> spans) { timeline_ = std::move(spans); }

void RunWatch::sample(TextSample sample) {
  console_.sample(sample);
  if (events_) events_->sample(sample, seconds_since_1970());
  sample_ = std::move(sample);
}

void RunWatch::end(const EndRecord& record) {
  history_.add(record);
  keep(record, seconds_since_1970());
  tell_wandb([&] {
    wandb_->ask({{"action", "end_wandb"}, {"code", record.stopped_by.empty() ? 0 : 1}});
  });
  if (report_) write_report();
  console_.end(record, history_.best_validation, options_.report_path);
}

void RunWatch::write_report() {
  report_->write([this] {
    return report_page({.facts = facts_,
                        .history = history_,
                        .timeline = timeline_,
                        .sample = sample_ ? &*sample_ : nullptr});
  });
}

}  // namespace fsdp::train
