// Records what the threads of one rank and its GPU do, span by span, for a trace.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/train/log/chrome_trace.h"

namespace fsdp::train {

enum class TraceDetail : uint8_t {
  kSchedule,  // the engine's own ranges: gathers, reductions, updates
  kAll,       // operators of libtorch, too, and kernels and copies of a GPU
};

struct RecordedTrace {
  std::vector<TraceThread> threads;
  std::vector<TraceSpan> spans;  // times in ns since 1970
};

// Records from its construction until end(), through libtorch's profiling hooks. Belongs to the
// rank of the thread that makes it (thread_rank()); ranks that are threads of a process have one
// each. One of a process may have kAll.
class StepTrace {
 public:
  StepTrace(TraceDetail detail, c10::Device device);
  // Ends a recording that nobody wants any more.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  // Around a step, which becomes a span of the calling thread.
  void begin_step();
  void end_step(int64_t step);

  // Waits for the device, if its work is recorded. Spans that have not ended are left out.
  RecordedTrace end();

 private:
  class Recorder;

  std::shared_ptr<Recorder> recorder_;
  const c10::Device device_;
  bool is_device_traced_ = false;
  int64_t step_begin_ns_ = 0;
};

}  // namespace fsdp::train
