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

  bool operator==(const NamedValue&) const = default;
};

// One optimizer step of the whole job. Steps count from 1.
struct StepRecord {
  int64_t step = 0;
  int64_t total_steps = 0;
  double loss = 0;    // mean over the global batch; not finite when training has failed
  double loss_z = 0;  // deviations from the prediction of LossOutliers; filled by RunWatch
  double learning_rate = 0;
  double gradient_norm = 0;  // before clipping
  double milliseconds = 0;   // since the step before, without validations and saves in between
  double overhead_milliseconds = 0;  // of them: waiting for data, metrics and logs
  double tokens_per_second = 0;      // of all ranks together
  double teraflops = 0;              // of one device, counted by the model's formula; 0: unknown
  double mfu = 0;                    // teraflops as a fraction of the device's peak; 0: unknown
  int64_t peak_bytes = 0;            // memory so far: of a device, or of the whole process on a CPU
  int64_t tokens = 0;                // trained on so far, this step included
  bool is_skipped = false;           // there was no update, because gradients were not finite,
  bool learns = true;                // or because no token was learnt
  std::vector<NamedValue> terms = {};
};

struct ValidationRecord {
  int64_t step = 0;
  double loss = 0;  // mean over the validation tokens
  int64_t tokens = 0;
  double milliseconds = 0;
};

struct CheckpointRecord {
  int64_t step = 0;
  std::string path = {};
  int64_t bytes = 0;
  double blocked_milliseconds = 0;  // in which training stood still
  double milliseconds = 0;          // from the request until the checkpoint was on the disk
};

struct EndRecord {
  int64_t step = 0;       // the last finished one
  int64_t num_steps = 0;  // that this process did
  double seconds = 0;
  std::string stopped_by = {};  // "SIGTERM"; "": the run is complete
};

// --- what is known besides -----------------------------------------------------------------------

struct SettingRow {
  std::string group = {};  // "model", "data", in the order of their first settings
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
  std::string beginning = {};  // what was chosen, and why, in a line
  std::string title = {};      // "tiny: Llama, 1.8 M parameters, 2 ranks"
  std::vector<SettingRow> settings = {};
  std::vector<EnvironmentRow> environment = {};
  std::vector<MemoryRow> memory = {};
  int64_t resumed_step = 0;  // after which the run goes on; 0: a new run
};

// Text that the model wrote.
struct TextSample {
  int64_t step = 0;
  std::string prompt = {};
  std::string continuation = {};
};

}  // namespace fsdp::train
