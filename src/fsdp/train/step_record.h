// What happened in a training run, as plain numbers: what the console, the logs and the report are
// made from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::train {

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
  // How far the loss is off what recent steps let expect, in their deviations. Filled by RunWatch.
  double loss_z = 0;
  double learning_rate = 0;
  // Before clipping.
  double gradient_norm = 0;
  // From the end of the step before, without validations and saves between them.
  double milliseconds = 0;
  // How much of that the rank spent on other things than the step itself: waiting for data, metrics
  // and logs.
  double overhead_milliseconds = 0;
  // Of all ranks together.
  double tokens_per_second = 0;
  // Of one device, counted by the model's formula; 0: unknown.
  double teraflops = 0;
  // teraflops as a fraction of the device's peak; 0: unknown.
  double mfu = 0;
  // Most memory so far: of a device, or of the whole process on a CPU.
  int64_t peak_bytes = 0;
  // Trained on so far, this step included.
  int64_t tokens = 0;
  // The update was left out, because gradients were not finite.
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
  // How long the training stood still for it.
  double blocked_milliseconds = 0;
  // From the request until it was on the disk.
  double milliseconds = 0;
};

struct EndRecord {
  // The last step that was done, and how many this process did.
  int64_t step = 0;
  int64_t num_steps = 0;
  double seconds = 0;
  // Why it ended before the last step: "SIGTERM". "": it is complete.
  std::string stopped_by = {};
};

}  // namespace fsdp::train
