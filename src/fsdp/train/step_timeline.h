// What one rank did when, in one step: computing, gathering, reducing, updating.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/train/run_facts.h"

namespace fsdp::train {

// Records the calling thread's rank from its construction until finish(), through libtorch's
// profiling hooks. On a device the times are those in which the host queued the work. One at a
// time in a process.
class StepTimeline {
 public:
  StepTimeline();
  ~StepTimeline();
  StepTimeline(const StepTimeline&) = delete;
  StepTimeline& operator=(const StepTimeline&) = delete;

  // Rows "compute", "gather", "reduce" and "update", each in order of time.
  std::vector<TimelineSpan> finish();

 private:
  class Recorder;
  std::shared_ptr<Recorder> recorder_;
};

}  // namespace fsdp::train
