// Shows what ran when, on which thread: a picture in text, from libtorch's own profiling hooks.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bench {

// One line of the picture: ranges whose name begins with `prefix`, on the thread that made the
// timeline or on the others.
struct TimelineRow {
  std::string label;
  std::string prefix;
  bool on_this_thread = false;
};

// Records from its construction until stop().
class Timeline {
 public:
  explicit Timeline(std::vector<TimelineRow> rows) : rows_(std::move(rows)) {
    active() = this;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&Timeline::begin, &Timeline::end)
                                        .scopes({at::RecordScope::FUNCTION}));
  }
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  void stop() {
    if (handle_ != 0) at::removeCallback(handle_);
    handle_ = 0;
    active() = nullptr;
  }

  // `#` where a row is busy for most of a column's time, `.` where it is for some of it.
  void print(int columns) const {
    double last = 0;
    for (const Span& span : spans_) last = std::max(last, span.end);
    size_t width = 0;
    for (const TimelineRow& row : rows_) width = std::max(width, row.label.size());
    for (size_t i = 0; i < rows_.size(); ++i) {
      std::vector<double> busy(static_cast<size_t>(columns), 0.0);
      double sum = 0;
      for (const auto& [begin, end] : merged(i)) {
        sum += end - begin;
        for (int column = 0; column < columns; ++column) {
          const double from = last * column / columns;
          const double to = last * (column + 1) / columns;
          busy[static_cast<size_t>(column)] +=
              std::max(0.0, std::min(end, to) - std::max(begin, from));
        }
      }
      std::string line;
      for (const double part : busy) {
        const double fraction = part * columns / last;
        line += fraction > 0.5 ? '#' : fraction > 0.0 ? '.' : ' ';
      }
      std::printf("#   %-*s |%s| %.1f ms\n", static_cast<int>(width), rows_[i].label.c_str(),
                  line.c_str(), sum / 1e3);
    }
  }

 private:
  struct Span {
    size_t row;
    double begin;  // in us
    double end;
  };
  struct Begun : at::ObserverContext {
    size_t row = 0;
    double begin = 0;
  };

  // A row's ranges without those inside others.
  std::vector<std::pair<double, double>> merged(size_t row) const {
    std::vector<std::pair<double, double>> ranges;
    for (const Span& span : spans_)
      if (span.row == row) ranges.emplace_back(span.begin, span.end);
    std::sort(ranges.begin(), ranges.end());
    std::vector<std::pair<double, double>> result;
    for (const auto& [begin, end] : ranges) {
      if (result.empty() || begin > result.back().second) result.emplace_back(begin, end);
      result.back().second = std::max(result.back().second, end);
    }
    return result;
  }

  static Timeline*& active() {
    static Timeline* timeline = nullptr;
    return timeline;
  }

  double now() const {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start_)
        .count();
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    Timeline* timeline = active();
    if (timeline == nullptr) return nullptr;
    const bool here = std::this_thread::get_id() == timeline->thread_;
    const std::string_view name = function.name();
    for (size_t i = 0; i < timeline->rows_.size(); ++i) {
      const TimelineRow& row = timeline->rows_[i];
      if (row.on_this_thread != here || name.substr(0, row.prefix.size()) != row.prefix) continue;
      auto begun = std::make_unique<Begun>();
      begun->row = i;
      begun->begin = timeline->now();
      return begun;
    }
    return nullptr;
  }

  static void end(const at::RecordFunction&, at::ObserverContext* context) {
    Timeline* timeline = active();
    const auto* begun = static_cast<const Begun*>(context);
    if (timeline == nullptr || begun == nullptr) return;
    const std::lock_guard lock(timeline->mutex_);
    timeline->spans_.push_back({begun->row, begun->begin, timeline->now()});
  }

  const std::vector<TimelineRow> rows_;
  const std::thread::id thread_ = std::this_thread::get_id();
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  at::CallbackHandle handle_ = 0;
  std::mutex mutex_;
  std::vector<Span> spans_;
};

}  // namespace bench
