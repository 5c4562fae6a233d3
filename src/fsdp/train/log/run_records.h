// A run as plain data: what happened in its steps, and facts about it. The console, the logs and
// the report are made from these records.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

// --- what happened -------------------------------------------------------------------------------

// A part of the loss, such as "load_balance".
struct NamedValue {
  std::string name = {};
  double value = 0;
};

// One optimizer step of the whole job. Steps count from 1.
struct StepRecord {
  int64_t step = 0;
  int64_t total_steps = 0;
  // Mean over the global batch; not finite when training has failed.
  double loss = 0;
  // How far the loss is from the prediction of LossOutliers, in deviations. Filled by RunWatch.
  double loss_z = 0;
  double learning_rate = 0;
  // Before clipping.
  double gradient_norm = 0;
  // Since the end of the step before, without validations and saves in between.
  double milliseconds = 0;
  // The part of `milliseconds` that the rank did not spend on the step itself, but on waiting for
  // data, metrics and logs.
  double overhead_milliseconds = 0;
  // Of all ranks together.
  double tokens_per_second = 0;
  // Of one device, counted by the model's formula; 0: unknown.
  double teraflops = 0;
  // teraflops as a fraction of the device's peak; 0: unknown.
  double mfu = 0;
  // Peak memory so far: of a device, or of the whole process on a CPU.
  int64_t peak_bytes = 0;
  // Trained on so far, this step included.
  int64_t tokens = 0;
  // Gradients were not finite, so there was no update.
  bool is_skipped = false;
  std::vector<NamedValue> terms = {};
};

struct ValidationRecord {
  int64_t step = 0;
  // Mean over the validation tokens.
  double loss = 0;
  int64_t tokens = 0;
  double milliseconds = 0;
};

struct CheckpointRecord {
  int64_t step = 0;
  std::string path = {};
  int64_t bytes = 0;
  // How long training stood still for the save.
  double blocked_milliseconds = 0;
  // From the request until the checkpoint was on the disk.
  double milliseconds = 0;
};

struct EndRecord {
  // The last finished step, and how many steps this process did.
  int64_t step = 0;
  int64_t num_steps = 0;
  double seconds = 0;
  // Why the run ended before the last step: "SIGTERM". "": it is complete.
  std::string stopped_by = {};
};

// --- what is known besides -----------------------------------------------------------------------

struct SettingRow {
  // "model", "data", "sharding". Settings of a group are shown together; groups come in the order
  // of their first settings.
  std::string group = {};
  std::string name = {};
  std::string value = {};
  bool is_changed = false;  // not the default
  std::string help = {};
};

struct EnvironmentRow {
  std::string name = {};
  std::string value = {};
};

constexpr int64_t kUnknownBytes = -1;

// One kind of memory on the fullest rank.
struct MemoryRow {
  std::string kind = {};
  int64_t forecast_bytes = kUnknownBytes;
  int64_t measured_bytes = kUnknownBytes;
  bool is_on_host = false;  // in host memory beside a device
};

// Something that took time in a step. Spans of a row may be nested.
struct TimelineSpan {
  std::string row = {};  // "compute", "gather", "reduce", "update"
  double begin_us = 0;
  double end_us = 0;
  std::string label = {};
};

struct RunFacts {
  std::string title = {};  // "tiny: Llama, 1.8 M parameters, 2 ranks"
  std::vector<SettingRow> settings = {};
  std::vector<EnvironmentRow> environment = {};
  std::vector<MemoryRow> memory = {};
  // The run continues after this step; 0: it is a new run.
  int64_t resumed_step = 0;
};

// Text that the model wrote.
struct TextSample {
  int64_t step = 0;
  std::string prompt = {};
  std::string continuation = {};
};

}  // namespace fsdp::train
