// The timeline of one rank in one step: computing, gathering, reducing, updating.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// Records the calling thread's rank from its construction until end(), through libtorch's profiling
// hooks. On a device it records when the host queued the work. One per process at a time.
class StepTimeline {
 public:
  StepTimeline();
  ~StepTimeline();
  StepTimeline(const StepTimeline&) = delete;
  StepTimeline& operator=(const StepTimeline&) = delete;

  // Rows "compute", "gather", "reduce" and "update", each in order of time.
  std::vector<TimelineSpan> end();

 private:
  class Recorder;
  std::shared_ptr<Recorder> recorder_;
};

}  // namespace fsdp::train
