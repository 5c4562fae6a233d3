// `--trace` of a run: records the chosen steps of all ranks and writes them as one file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fsdp/comm/world.h"
#include "fsdp/train/step_trace.h"

namespace fsdp::train {

// All ranks construct and call it alike; rank 0 writes.
class RunTrace {
 public:
  // Steps from `first` to `last`. The file is a trace without spans until the last of them, so that
  // a path that cannot be written is refused now, and a run that is killed leaves a whole file.
  RunTrace(std::string path, int64_t first, int64_t last, World& world, c10::Device device);

  // Around each step of the run.
  void begin_step(int64_t step);
  void end_step(int64_t step);

  // After the last step of a run that ended before `last`.
  void end();

 private:
  void write(const std::string& mine);

  const std::string path_;
  const int64_t first_;
  const int64_t last_;
  World& world_;
  const c10::Device device_;
  std::optional<StepTrace> trace_;
  int64_t base_ns_ = 0;  // rank 0's time at the beginning
};

}  // namespace fsdp::train
