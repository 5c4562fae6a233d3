// The work of a rank's threads and its GPU in some steps, span by span: recorded for the timeline
// of a report, and for `--trace` of a run, whose file Perfetto and chrome://tracing open.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/world.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- recording -----------------------------------------------------------------------------------

enum class TraceDetail : uint8_t {
  kSchedule,  // the engine's own ranges: gathers, reductions, updates
  kAll,       // operators of libtorch, too, and kernels and copies of a GPU
};

struct TraceSpan {
  // A row of the trace; spans of a row are nested or apart. 0: the thread that made the recorder.
  int64_t thread = 0;
  std::string name = {};
  const char* kind = "";  // "compute", "gather", "step", ...
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

struct TraceThread {
  int64_t thread = 0;
  std::string name = {};
};

struct RecordedTrace {
  std::vector<TraceThread> threads;
  std::vector<TraceSpan> spans;  // times in ns since 1970
};

// Records from its construction until end(), through libtorch's profiling hooks. Belongs to the
// rank of the thread that makes it (thread_rank()), which may have several. Kernels of a GPU can be
// recorded once at a time in a process; with a CPU as device, its operators are spans of the host.
class StepRecorder {
 public:
  StepRecorder(TraceDetail detail, c10::Device device);
  // Ends a recording that nobody wants any more.
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  // Around a step, which becomes a span of the calling thread.
  void begin_step();
  void end_step(int64_t step);

  // Waits for the device, if its work is recorded. Spans that have not ended are left out.
  RecordedTrace end();

 private:
  class Recording;

  std::shared_ptr<Recording> recording_;
  const c10::Device device_;
  bool is_device_traced_ = false;
  int64_t step_begin_ns_ = 0;
};

// Rows "compute", "gather", "reduce" and "update", each in order of time: what the thread that made
// the recorder computed, and the engine's work on all threads.
std::vector<TimelineSpan> timeline_of(const RecordedTrace& trace);

// --- the trace of a run --------------------------------------------------------------------------

// The events of one rank, to be joined with those of others. Times are from `base_ns` on.
std::string trace_events(int rank, const RecordedTrace& trace, int64_t base_ns);

// The whole file; no events are a trace, too.
std::string trace_document(std::span<const std::string> events_of_ranks);

// All ranks construct and call it alike; rank 0 writes.
class RunTrace {
 public:
  // Steps from `first` to `last`. The file is a trace without spans until the last of them, so that
  // a path that cannot be written is refused now, and a run that is killed leaves a whole file.
  RunTrace(std::string path, int64_t first, int64_t last, World& world, c10::Device device);

  // Around each step of the run.
  void begin_step(int64_t step);
  void end_step(int64_t step);

  bool ends_with(int64_t step) const { return step == last_; }
  // After that step, or after the last one of a run that ended before; a second call does nothing.
  void end();

 private:
  void write(const std::string& mine);

  const std::string path_;
  const int64_t first_;
  const int64_t last_;
  World& world_;
  const c10::Device device_;
  std::optional<StepRecorder> trace_;
  int64_t base_ns_ = 0;  // rank 0's time at the beginning
};

}  // namespace fsdp::train
