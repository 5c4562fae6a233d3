// Every block that libtorch's allocator gives the calling thread, and the blocks that live at the
// peak.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {

// While it lives, records memory of devices, or of the host, that its thread allocates and frees.
class AllocationLog {
 public:
  enum class Of { kDevices, kHost };

  explicit AllocationLog(Of of = Of::kDevices)
      : log_(std::make_shared<Log>(of)), guard_(c10::DebugInfoKind::PROFILER_STATE, log_) {}

  int64_t bytes() const {
    return log_->bytes;
  }  // since the beginning; what others freed counts less
  int64_t peak_bytes() const { return log_->peak_bytes; }
  // Since the beginning: how many blocks of each size live now, and at the peak.
  std::map<int64_t, int64_t> live() const { return log_->live_after(log_->events.size()); }
  std::map<int64_t, int64_t> live_at_peak() const { return log_->live_after(log_->peak_event); }

 private:
  struct Event {
    void* address;
    int64_t bytes;  // negative: released
  };
  struct Log final : c10::MemoryReportingInfoBase {
    explicit Log(Of what) : of(what) {}
    void reportMemoryUsage(void* address, int64_t size, size_t, size_t,
                           c10::Device device) override {
      if (device.is_cpu() != (of == Of::kHost)) return;
      events.push_back({address, size});
      bytes += size;
      if (bytes <= peak_bytes) return;
      peak_bytes = bytes;
      peak_event = events.size();
    }
    bool memoryProfilingEnabled() const override { return true; }

    std::map<int64_t, int64_t> live_after(size_t count) const {
      std::map<void*, int64_t> blocks;
      for (size_t i = 0; i < count; ++i) {
        if (events[i].bytes > 0)
          blocks[events[i].address] = events[i].bytes;
        else
          blocks.erase(events[i].address);
      }
      std::map<int64_t, int64_t> sizes;
      for (const auto& [address, size] : blocks) ++sizes[size];
      return sizes;
    }

    const Of of;
    std::vector<Event> events;
    int64_t bytes = 0;
    int64_t peak_bytes = 0;
    size_t peak_event = 0;
  };

  std::shared_ptr<Log> log_;
  c10::DebugInfoGuard guard_;
};

}  // namespace fsdp::testing
