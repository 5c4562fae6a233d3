#include "fsdp/train/step_timeline.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/train/range_kind.h"

namespace fsdp::train {

namespace {

using Clock = std::chrono::steady_clock;

// Operators that follow each other this closely become one span: a picture does not show the gaps,
// and a step of a large model has a hundred thousand of them.
constexpr double kGapUs = 30;

constexpr const char* kCompute = "compute";

}  // namespace

class StepTimeline::Recorder {
 public:
  // Other threads may be inside a callback when a recording ends; the shared pointer keeps the
  // recorder until they have left.
  static void start(const std::shared_ptr<Recorder>& recorder) {
    {
      const std::lock_guard lock(active_mutex());
      FSDP_CHECK(active() == nullptr, "another timeline is being recorded; one at a time");
      active() = recorder;
    }
    recorder->handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&Recorder::begin, &Recorder::end)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }

  void stop() {
    if (handle_ != 0) at::removeCallback(handle_);
    handle_ = 0;
    const std::lock_guard lock(active_mutex());
    if (active().get() == this) active().reset();
  }

  std::vector<TimelineSpan> stop_and_join() {
    stop();
    const std::lock_guard lock(mutex_);
    std::stable_sort(
        spans_.begin(), spans_.end(),
        [](const TimelineSpan& a, const TimelineSpan& b) { return a.begin_us < b.begin_us; });
    std::vector<TimelineSpan> result;
    for (const TimelineSpan& span : spans_) {
      const auto last = std::find_if(result.rbegin(), result.rend(), [&](const TimelineSpan& each) {
        return each.row == span.row;
      });
      const bool joins =
          last != result.rend() && span.row == kCompute && span.begin_us <= last->end_us + kGapUs;
      if (joins)
        last->end_us = std::max(last->end_us, span.end_us);
      else
        result.push_back(span);
    }
    return result;
  }

 private:
  struct Begun : at::ObserverContext {
    const char* row = nullptr;
    std::string label;
    double begin_us = 0;
  };

  // Global, because libtorch's callbacks carry no pointer of ours.
  static std::shared_ptr<Recorder>& active() {
    static std::shared_ptr<Recorder> recorder;
    return recorder;
  }
  static std::mutex& active_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::shared_ptr<Recorder> current() {
    const std::lock_guard lock(active_mutex());
    return active();
  }

  // How many of our ranges this thread is in.
  static int& depth() {
    thread_local int ranges = 0;
    return ranges;
  }

  double now_us() const {
    return std::chrono::duration<double, std::micro>(Clock::now() - start_).count();
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    const std::shared_ptr<const Recorder> recorder = current();
    if (recorder == nullptr || thread_rank() != recorder->rank_) return nullptr;
    const std::string_view name = function.name();
    auto begun = std::make_unique<Begun>();
    if (const RangeKind* const kind = find_range_kind(name)) {
      begun->row = kind->kind;
      begun->label = std::string(name.substr(std::min(kind->prefix.size() + 1, name.size())));
      // Operators inside belong to it.
      ++depth();
    } else {
      // The engine's other ranges only queue work. Operators of other threads, and those inside our
      // ranges, are part of our ranges.
      if (name.starts_with("fsdp::") || depth() > 0 ||
          std::this_thread::get_id() != recorder->thread_)
        return nullptr;
      begun->row = kCompute;
    }
    begun->begin_us = recorder->now_us();
    return begun;
  }

  static void end(const at::RecordFunction&, at::ObserverContext* context) {
    auto* begun = static_cast<Begun*>(context);
    if (begun == nullptr) return;
    if (begun->row != kCompute) --depth();
    const std::shared_ptr<Recorder> recorder = current();
    if (recorder == nullptr) return;
    const std::lock_guard lock(recorder->mutex_);
    recorder->spans_.push_back(
        {begun->row, begun->begin_us, recorder->now_us(), std::move(begun->label)});
  }

  const int rank_ = thread_rank();
  const std::thread::id thread_ = std::this_thread::get_id();
  const Clock::time_point start_ = Clock::now();
  at::CallbackHandle handle_ = 0;
  std::mutex mutex_;
  std::vector<TimelineSpan> spans_;
};

StepTimeline::StepTimeline() : recorder_(std::make_shared<Recorder>()) {
  Recorder::start(recorder_);
}
StepTimeline::~StepTimeline() { recorder_->stop(); }
std::vector<TimelineSpan> StepTimeline::end() { return recorder_->stop_and_join(); }

}  // namespace fsdp::train
