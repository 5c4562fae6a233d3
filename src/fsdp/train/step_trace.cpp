#include "fsdp/train/step_trace.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/train/range_kind.h"

namespace fsdp::train {

namespace {

// Rows of a GPU's streams come after those of threads.
constexpr int64_t kFirstStreamRow = 10000;
constexpr std::string_view kCommPrefix = "fsdp::comm ";

int64_t steady_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int64_t system_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

const char* kind_of_range(std::string_view name) {
  if (const RangeKind* const kind = find_range_kind(name)) return kind->kind;
  return name.starts_with("fsdp::") ? "engine" : "compute";
}

torch::profiler::impl::ProfilerConfig device_config() {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO);
}

const std::set<torch::profiler::impl::ActivityType> kDeviceActivities = {
    torch::profiler::impl::ActivityType::CUDA};

}  // namespace

class StepTrace::Recorder {
 public:
  explicit Recorder(TraceDetail detail) : detail_(detail) { row_of_this_thread(); }

  static void start(const std::shared_ptr<Recorder>& recorder) {
    const std::lock_guard lock(active_mutex());
    FSDP_CHECK(active().emplace(recorder->rank_, recorder).second, "another trace of rank ",
               recorder->rank_, " is being recorded; one at a time");
    // One callback serves all ranks of the process.
    if (active().size() > 1) return;
    handle() = at::addGlobalCallback(
        at::RecordFunctionCallback(&Recorder::begin, &Recorder::end)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }

  static void stop(const std::shared_ptr<Recorder>& recorder) {
    const std::lock_guard lock(active_mutex());
    const auto found = active().find(recorder->rank_);
    if (found == active().end() || found->second != recorder) return;
    active().erase(found);
    if (active().empty()) at::removeCallback(std::exchange(handle(), 0));
  }

  // As the wall clock has it, which a GPU's spans and other hosts share, but never backwards.
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
  struct Begun : at::ObserverContext {
    std::shared_ptr<Recorder> recorder;
    int64_t begin_ns = 0;
  };

  // Global, because libtorch's callbacks carry no pointer of ours.
  static std::map<int, std::shared_ptr<Recorder>>& active() {
    static std::map<int, std::shared_ptr<Recorder>> recorders;
    return recorders;
  }
  static at::CallbackHandle& handle() {
    static at::CallbackHandle handle = 0;
    return handle;
  }
  static std::mutex& active_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  // Of a thread that has no rank, such as those of libtorch: the only one, if there is one.
  static std::shared_ptr<Recorder> of_this_thread() {
    const std::lock_guard lock(active_mutex());
    const auto found = active().find(thread_rank());
    if (found != active().end()) return found->second;
    return thread_rank() < 0 && active().size() == 1 ? active().begin()->second : nullptr;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    std::shared_ptr<Recorder> recorder = of_this_thread();
    if (recorder == nullptr) return nullptr;
    const std::string_view name = function.name();
    if (recorder->detail_ == TraceDetail::kSchedule && !name.starts_with("fsdp::")) return nullptr;
    auto begun = std::make_unique<Begun>();
    begun->begin_ns = recorder->now_ns();
    begun->recorder = std::move(recorder);
    return begun;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    auto* const begun = static_cast<Begun*>(context);
    if (begun == nullptr) return;
    const std::string_view name = function.name();
    const std::string_view shown =
        name.starts_with(kCommPrefix) ? name.substr(kCommPrefix.size()) : name;
    begun->recorder->add(std::string(shown), kind_of_range(name), begun->begin_ns);
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

StepTrace::StepTrace(TraceDetail detail, c10::Device device)
    : recorder_(std::make_shared<Recorder>(detail)), device_(device) {
  Recorder::start(recorder_);
  if (detail != TraceDetail::kAll || device.is_cpu()) return;
  torch::autograd::profiler::prepareProfiler(device_config(), kDeviceActivities);
  torch::autograd::profiler::enableProfiler(device_config(), kDeviceActivities);
  is_device_traced_ = true;
}

StepTrace::~StepTrace() {
  Recorder::stop(recorder_);
  if (is_device_traced_) static_cast<void>(torch::autograd::profiler::disableProfiler());
}

void StepTrace::begin_step() { step_begin_ns_ = recorder_->now_ns(); }

void StepTrace::end_step(int64_t step) {
  recorder_->add(concat("step ", step), "step", step_begin_ns_);
}

RecordedTrace StepTrace::end() {
  Recorder::stop(recorder_);
  RecordedTrace trace = recorder_->take();
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

}  // namespace fsdp::train
