// Everything that watches a run, behind one object: the trainer reports what happened, and console,
// log, TensorBoard and report show it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/train/console.h"
#include "fsdp/train/json_log.h"
#include "fsdp/train/outliers.h"
#include "fsdp/train/report_file.h"
#include "fsdp/train/run_facts.h"
#include "fsdp/train/run_history.h"
#include "fsdp/train/step_record.h"
#include "fsdp/train/tensorboard_events.h"

namespace fsdp::train {

struct WatchOptions {
  // JSON lines; "": none.
  std::string log_path = {};
  // A directory for event files; "": none.
  std::string tensorboard_dir = {};
  // An HTML page, written again and again while the run goes on; "": none.
  std::string report_path = {};
  ConsoleOptions console = {};
};

// Lives on one rank and one thread. Only the constructor fails (files that cannot be made); later
// troubles with files are warned of once, and training goes on.
class RunWatch {
 public:
  // Prints settings and forecast, and begins or goes on with the files.
  RunWatch(WatchOptions options, RunFacts facts, std::ostream& out);

  // Fills record.loss_z. The records of a run come in order of their steps.
  void step(StepRecord record);
  void validation(const ValidationRecord& record);
  void checkpoint(const CheckpointRecord& record);
  // Replaces the rows of RunFacts, once memory is measured.
  void memory(std::vector<MemoryRow> rows);
  // Of one step; the last one is shown.
  void timeline(std::vector<TimelineSpan> spans);
  void sample(TextSample sample);
  void end(const EndRecord& record);

  // A line for the person at the console.
  void note(std::string_view text) { console_.note(text); }

  // The lowest validation loss so far, that of runs before the resume included.
  const std::optional<ValidationRecord>& best_validation() const {
    return history_.best_validation();
  }

 private:
  void write_report();

  WatchOptions options_;
  RunFacts facts_;
  Console console_;
  RunHistory history_;
  LossOutliers outliers_;
  std::vector<TimelineSpan> timeline_;
  std::optional<TextSample> sample_;
  std::optional<JsonLog> log_;
  std::optional<TensorboardEvents> events_;
  std::optional<ReportFile> report_;
};

}  // namespace fsdp::train
