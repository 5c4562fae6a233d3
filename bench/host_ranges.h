// When named ranges ran on any thread of this process, by the clock that libtorch's traces use:
// what a device's trace lacks.
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bench {

struct HostRange {
  std::string name;
  int64_t begin_ns = 0;  // since the epoch
  int64_t end_ns = 0;
};

// Records ranges whose name begins with `prefix` from its construction until finish(). One at a
// time.
class HostRanges {
 public:
  explicit HostRanges(std::string prefix) : prefix_(std::move(prefix)) {
    active() = this;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&HostRanges::begin, &HostRanges::end)
                                        .scopes({at::RecordScope::FUNCTION}));
  }
  ~HostRanges() { finish(); }
  HostRanges(const HostRanges&) = delete;
  HostRanges& operator=(const HostRanges&) = delete;

  std::vector<HostRange> finish() {
    if (handle_ != 0) at::removeCallback(handle_);
    handle_ = 0;
    active() = nullptr;
    const std::lock_guard lock(mutex_);
    return std::move(ranges_);
  }

 private:
  struct Begun : at::ObserverContext {
    int64_t begin_ns = 0;
  };

  static HostRanges*& active() {
    static HostRanges* ranges = nullptr;
    return ranges;
  }
  static int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    const HostRanges* ranges = active();
    const std::string_view name = function.name();
    if (ranges == nullptr || name.substr(0, ranges->prefix_.size()) != ranges->prefix_)
      return nullptr;
    auto begun = std::make_unique<Begun>();
    begun->begin_ns = now_ns();
    return begun;
  }
  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    HostRanges* ranges = active();
    const auto* begun = static_cast<const Begun*>(context);
    if (ranges == nullptr || begun == nullptr) return;
    const std::lock_guard lock(ranges->mutex_);
    ranges->ranges_.push_back({function.name(), begun->begin_ns, now_ns()});
  }

  const std::string prefix_;
  at::CallbackHandle handle_ = 0;
  std::mutex mutex_;
  std::vector<HostRange> ranges_;
};

}  // namespace bench
