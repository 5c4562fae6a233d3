#include "fsdp/train/run_trace.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/train/report/report_page.h"

namespace fsdp::train {

namespace {

// Rows of a GPU's streams come after those of threads.
constexpr int64_t kFirstStreamRow = 10000;
constexpr std::string_view kCommPrefix = "fsdp::comm ";
// Operators that follow each other this closely become one span of a timeline: a picture does not
// show the gaps, and a step of a large model has a hundred thousand of them.
constexpr double kGapUs = 30;

int64_t steady_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int64_t system_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

struct RangeKind {
  std::string_view prefix;
  const char* kind;
};

// Ranges that do work, by the beginning of their names; the others only queue some.
constexpr std::array<RangeKind, 6> kRangeKinds = {{
    {"fsdp::comm all_gather", "gather"},
    {"fsdp::comm reduce_scatter", "reduce"},
    {"fsdp::comm all_to_all", "reduce"},
    {"fsdp::comm all_reduce", "reduce"},
    {"fsdp::update_unit", "update"},
    {"fsdp::update_on_host", "update"},
}};

const char* kind_of_range(std::string_view name) {
  for (const RangeKind& each : kRangeKinds)
    if (name.starts_with(each.prefix)) return each.kind;
  return name.starts_with("fsdp::") ? "engine" : "compute";
}

torch::profiler::impl::ProfilerConfig device_config() {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO);
}

const std::set<torch::profiler::impl::ActivityType> kDeviceActivities = {
    torch::profiler::impl::ActivityType::CUDA};

}  // namespace

class StepRecorder::Recording {
 public:
  explicit Recording(TraceDetail detail) : detail_(detail) { row_of_this_thread(); }

  static void start(const std::shared_ptr<Recording>& recording) {
    const std::lock_guard lock(active_mutex());
    active().push_back(recording);
    // One callback serves all recordings of the process.
    if (active().size() > 1) return;
    handle() = at::addGlobalCallback(
        at::RecordFunctionCallback(&Recording::begin, &Recording::end)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }

  static void stop(const std::shared_ptr<Recording>& recording) {
    const std::lock_guard lock(active_mutex());
    if (std::erase(active(), recording) > 0 && active().empty())
      at::removeCallback(std::exchange(handle(), 0));
  }

  // The wall clock's time, which a GPU's spans and other hosts share, but never backwards.
  int64_t now_ns() const { return steady_ns() + offset_ns_; }

  void add(std::string name, const char* kind, int64_t begin_ns) {
    const int64_t end_ns = now_ns();
    const std::lock_guard lock(mutex_);
    spans_.push_back({row_of_this_thread(), std::move(name), kind, begin_ns, end_ns});
  }

  RecordedTrace take() {
    const std::lock_guard lock(mutex_);
    RecordedTrace trace;
    // A thread is called after the work that it did first.
    std::map<std::string, int64_t> num_named;
    for (const auto& [id, row] : rows_) {
      std::string name = row == 0 ? "compute" : "other work";
      for (const TraceSpan& span : spans_) {
        const std::string_view kind = span.kind;
        if (row == 0 || span.thread != row || kind == "compute" || kind == "engine") continue;
        name = kind;
        break;
      }
      trace.threads.push_back({row, name});
    }
    std::sort(trace.threads.begin(), trace.threads.end(),
              [](const TraceThread& a, const TraceThread& b) { return a.thread < b.thread; });
    for (TraceThread& each : trace.threads)
      if (const int64_t number = ++num_named[each.name]; number > 1)
        each.name += concat(" ", number);
    trace.spans = std::move(spans_);
    return trace;
  }

 private:
  // The recordings that were active when a function began, and its beginning on their clocks.
  struct Begun : at::ObserverContext {
    std::vector<std::pair<std::shared_ptr<Recording>, int64_t>> recordings;
  };

  // Global, because libtorch's callbacks carry no pointer of ours.
  static std::vector<std::shared_ptr<Recording>>& active() {
    static std::vector<std::shared_ptr<Recording>> recordings;
    return recordings;
  }
  static at::CallbackHandle& handle() {
    static at::CallbackHandle handle = 0;
    return handle;
  }
  static std::mutex& active_mutex() {
    static std::mutex mutex;
    return mutex;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    const bool is_ours = std::string_view(function.name()).starts_with("fsdp::");
    std::unique_ptr<Begun> begun;
    const std::lock_guard lock(active_mutex());
    // A thread without a rank, such as those of libtorch, works for the only one there is.
    const bool is_anyones =
        thread_rank() < 0 && std::ranges::all_of(active(), [](const auto& each) {
          return each->rank_ == active().front()->rank_;
        });
    for (const std::shared_ptr<Recording>& each : active()) {
      const bool is_its = is_anyones || thread_rank() == each->rank_;
      if (!is_its || (each->detail_ == TraceDetail::kSchedule && !is_ours)) continue;
      if (!begun) begun = std::make_unique<Begun>();
      begun->recordings.emplace_back(each, each->now_ns());
    }
    return begun;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    auto* const begun = static_cast<Begun*>(context);
    if (begun == nullptr) return;
    const std::string_view name = function.name();
    const std::string_view shown =
        name.starts_with(kCommPrefix) ? name.substr(kCommPrefix.size()) : name;
    for (const auto& [recording, begin_ns] : begun->recordings)
      recording->add(std::string(shown), kind_of_range(name), begin_ns);
  }

  // Under the lock, but for the constructor.
  int64_t row_of_this_thread() {
    return rows_.try_emplace(std::this_thread::get_id(), rows_.size()).first->second;
  }

  const TraceDetail detail_;
  const int rank_ = thread_rank();
  const int64_t offset_ns_ = system_ns() - steady_ns();
  std::mutex mutex_;
  std::map<std::thread::id, int64_t> rows_;
  std::vector<TraceSpan> spans_;
};

StepRecorder::StepRecorder(TraceDetail detail, c10::Device device)
    : recording_(std::make_shared<Recording>(detail)), device_(device) {
  Recording::start(recording_);
  if (detail != TraceDetail::kAll || device.is_cpu()) return;
  torch::autograd::profiler::prepareProfiler(device_config(), kDeviceActivities);
  torch::autograd::profiler::enableProfiler(device_config(), kDeviceActivities);
  is_device_traced_ = true;
}

StepRecorder::~StepRecorder() {
  Recording::stop(recording_);
  if (is_device_traced_) static_cast<void>(torch::autograd::profiler::disableProfiler());
}

void StepRecorder::begin_step() { step_begin_ns_ = recording_->now_ns(); }

void StepRecorder::end_step(int64_t step) {
  recording_->add(concat("step ", step), "step", step_begin_ns_);
}

RecordedTrace StepRecorder::end() {
  Recording::stop(recording_);
  RecordedTrace trace = recording_->take();
  if (!std::exchange(is_device_traced_, false)) return trace;
  c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  const auto result = torch::autograd::profiler::disableProfiler();
  std::set<int64_t> streams;
  for (const auto& event : result->events()) {
    if (event.deviceType() != device_.type()) continue;
    const int64_t row = kFirstStreamRow + event.deviceResourceId();
    if (streams.insert(row).second)
      trace.threads.push_back({row, concat("GPU stream ", event.deviceResourceId())});
    trace.spans.push_back({row, event.name(), "device", static_cast<int64_t>(event.startNs()),
                           static_cast<int64_t>(event.endNs())});
  }
  return trace;
}

std::vector<TimelineSpan> timeline_of(const RecordedTrace& trace) {
  std::vector<TraceSpan> spans = trace.spans;
  std::ranges::stable_sort(spans, {}, &TraceSpan::begin_ns);
  constexpr int64_t kComputing = 0;
  int64_t working_until = 0;            // in the engine's work, on the thread that computes
  std::optional<size_t> computed = {};  // the last span of that row
  std::vector<TimelineSpan> timeline;
  for (const TraceSpan& span : spans) {
    const std::string_view kind = span.kind;
    if (kind == "step" || kind == "engine" || kind == "device") continue;
    const double begin = static_cast<double>(span.begin_ns - spans.front().begin_ns) / 1e3;
    const double end = static_cast<double>(span.end_ns - spans.front().begin_ns) / 1e3;
    if (kind != "compute") {
      if (span.thread == kComputing) working_until = std::max(working_until, span.end_ns);
      const size_t blank = span.name.find(' ');
      timeline.push_back(
          {span.kind, begin, end, blank == std::string::npos ? "" : span.name.substr(blank + 1)});
      continue;
    }
    // Operators of other threads, and those inside the engine's work, are part of that.
    if (span.thread != kComputing || span.begin_ns < working_until) continue;
    if (computed && begin <= timeline[*computed].end_us + kGapUs) {
      timeline[*computed].end_us = std::max(timeline[*computed].end_us, end);
      continue;
    }
    computed = timeline.size();
    timeline.push_back({span.kind, begin, end, ""});
  }
  return timeline;
}

// --- the trace of a run --------------------------------------------------------------------------

namespace {

using Json = nlohmann::ordered_json;

// Names of kernels and operators come from others and need not be UTF-8.
void append(std::string& events, const Json& event) {
  if (!events.empty()) events += ",\n";
  events += event.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// A fact about a process or one of its threads, and the place among its like.
void append_name(std::string& events, const std::string& what, const Json& place,
                 const std::string& name, int64_t index) {
  Json event = {{"ph", "M"}, {"name", what + "_name"}};
  event.update(place);
  event["args"] = {{"name", name}};
  append(events, event);
  event["name"] = what + "_sort_index";
  event["args"] = {{"sort_index", index}};
  append(events, event);
}

}  // namespace

std::string trace_events(int rank, const RecordedTrace& trace, int64_t base_ns) {
  std::string events;
  append_name(events, "process", {{"pid", rank}}, concat("rank ", rank), rank);
  for (const TraceThread& each : trace.threads)
    append_name(events, "thread", {{"pid", rank}, {"tid", each.thread}}, each.name, each.thread);
  // The format counts in microseconds.
  const auto microseconds = [](int64_t ns) { return static_cast<double>(ns) / 1e3; };
  for (const TraceSpan& span : trace.spans)
    append(events, {{"ph", "X"},
                    {"name", span.name},
                    {"cat", span.kind},
                    {"pid", rank},
                    {"tid", span.thread},
                    {"ts", microseconds(span.begin_ns - base_ns)},
                    {"dur", microseconds(span.end_ns - span.begin_ns)}});
  return events;
}

std::string trace_document(std::span<const std::string> events_of_ranks) {
  return concat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", join(events_of_ranks, ",\n"),
                "\n]}\n");
}

RunTrace::RunTrace(std::string path, int64_t first, int64_t last, World& world, c10::Device device)
    : path_(std::move(path)), first_(first), last_(last), world_(world), device_(device) {
  if (world_.rank() != 0) return;
  check_replaceable(path_, "trace", "--trace");
  make_directories(directory_of(path_));
  write_file_durably(path_, trace_document({}));
}

void RunTrace::begin_step(int64_t step) {
  if (step == first_) {
    const at::Tensor base = at::full({1}, system_ns(), at::TensorOptions(device_).dtype(at::kLong));
    world_.communicator().broadcast(base, 0, "trace begins").wait();
    base_ns_ = base.item<int64_t>();
    // All operators of all ranks would be more than a browser shows, or rank 0 can hold.
    trace_.emplace(world_.rank() == 0 ? TraceDetail::kAll : TraceDetail::kSchedule, device_);
  }
  if (trace_) trace_->begin_step();
}

void RunTrace::end_step(int64_t step) {
  if (trace_) trace_->end_step(step);
}

void RunTrace::end() {
  if (!trace_) return;
  const RecordedTrace recorded = trace_->end();
  trace_.reset();
  write(trace_events(world_.rank(), recorded, base_ns_));
}

// Ranks have texts of different lengths, so the lengths travel first.
void RunTrace::write(const std::string& mine) {
  const auto num_ranks = static_cast<size_t>(world_.size());
  const auto length = static_cast<int64_t>(mine.size());
  const at::Tensor lengths =
      at::empty({world_.size()}, at::TensorOptions(device_).dtype(at::kLong));
  world_.communicator()
      .all_gather(lengths, at::full({1}, length, lengths.options()), "lengths of traces")
      .wait();
  const at::Tensor lengths_here = lengths.to(at::kCPU);
  const int64_t* const counts = lengths_here.const_data_ptr<int64_t>();
  const int64_t total = std::accumulate(counts, counts + num_ranks, int64_t{0});
  at::Tensor bytes = at::empty({length}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), mine.data(), mine.size());
  const at::Tensor all = at::empty({total}, at::TensorOptions(device_).dtype(at::kByte));
  world_.communicator()
      .all_gather(all, bytes.to(device_), "traces", std::span(counts, num_ranks))
      .wait();
  if (world_.rank() != 0) return;
  bytes = all.to(at::kCPU);
  const auto* text = static_cast<const char*>(bytes.const_data_ptr());
  std::vector<std::string> events;
  for (size_t rank = 0; rank < num_ranks; text += counts[rank], ++rank)
    events.emplace_back(text, static_cast<size_t>(counts[rank]));
  try {
    write_file_durably(path_, trace_document(events));
  } catch (const Error& error) {
    log(LogLevel::kWarning, "the trace cannot be written: ", error.what(),
        "; training goes on without it");
  }
}

}  // namespace fsdp::train
