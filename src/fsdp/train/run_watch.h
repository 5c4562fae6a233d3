// Everything that watches a run, behind one object: the trainer reports events, and console, log,
// TensorBoard and report show them.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/data/python_worker.h"
#include "fsdp/train/log/console.h"
#include "fsdp/train/log/json_log.h"
#include "fsdp/train/log/run_history.h"
#include "fsdp/train/log/run_records.h"
#include "fsdp/train/log/tensorboard_events.h"
#include "fsdp/train/report/report_page.h"

namespace fsdp::train {

struct WatchOptions {
  std::string log_path = {};         // JSON lines; "": none
  std::string tensorboard_dir = {};  // for event files; "": none
  std::string wandb_project = {};    // of Weights & Biases; "": none
  std::string wandb_name = {};       // of the run there
  std::string report_path = {};      // an HTML page, rewritten while the run goes on; "": none
  ConsoleOptions console = {};
};

// "log runs/a/log.jsonl (with every setting), report runs/a/report.html"; "": no files.
std::string files_text(const WatchOptions& watch, const std::string& trace);

// Lives on one rank and one thread. Only the constructor fails (files that cannot be made); later
// failures of files cause one warning, and training goes on.
class RunWatch {
 public:
  // Prints settings and forecast, and begins or continues the files.
  RunWatch(WatchOptions options, RunFacts facts, std::ostream& out);

  // Fills record.loss_z. Records must come in the order of their steps.
  void step(StepRecord record);
  void validation(const ValidationRecord& record);
  void checkpoint(const CheckpointRecord& record);
  // Replaces the rows of RunFacts after memory was measured.
  void memory(std::vector<MemoryRow> rows);
  // The spans of one step; the report shows the last call's.
  void timeline(std::vector<TimelineSpan> spans);
  void sample(TextSample sample);
  void end(const EndRecord& record);

  // A line for the person at the console.
  void note(std::string_view text) { console_.note(text); }

 private:
  void write_report();
  void keep(const LogRecord& record, double time);
  void tell_wandb(const std::function<void()>& action);

  WatchOptions options_;
  RunFacts facts_;
  Console console_;
  RunHistory history_;
  LossOutliers outliers_;
  std::vector<TimelineSpan> timeline_;
  std::optional<TextSample> sample_;
  std::optional<JsonLog> log_;
  std::unique_ptr<PythonWorker> wandb_;
  std::optional<TensorboardEvents> events_;
  std::optional<ReportFile> report_;
};

}  // namespace fsdp::train
