// Time and memory of a device through libtorch's device-neutral interface, so that one program
// measures CUDA and, for tests, the CPU.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bench {

// Until the device has done what it was asked for.
inline void synchronize(c10::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Marks on the current stream's time line, and what lies between them.
class DeviceClock {
 public:
  explicit DeviceClock(c10::Device device) : device_(device) {}

  void mark() {
    if (device_.is_cpu()) return times_.push_back(Clock::now());
    events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // one that takes time
    events_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  // Milliseconds from each mark to the next. Waits for the last one.
  std::vector<double> milliseconds() const {
    synchronize(device_);
    std::vector<double> result;
    for (size_t i = 1; i < times_.size(); ++i)
      result.push_back(
          std::chrono::duration<double, std::milli>(times_[i] - times_[i - 1]).count());
    for (size_t i = 1; i < events_.size(); ++i)
      result.push_back(events_[i - 1].elapsedTime(events_[i]));
    return result;
  }

 private:
  using Clock = std::chrono::steady_clock;

  const c10::Device device_;
  std::vector<c10::Event> events_;
  std::vector<Clock::time_point> times_;
};

struct DeviceMemory {
  int64_t peak_bytes = 0;      // handed out by libtorch's allocator, at most since forget_peak()
  int64_t reserved_bytes = 0;  // taken from the driver by it, likewise
  int64_t in_use_bytes = 0;    // of the device now, by whomever: contexts and NCCL included
};

// On a CPU: the most that this process ever had, in all fields.
inline DeviceMemory device_memory(c10::Device device) {
  if (device.is_cpu()) {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const int64_t bytes = int64_t{usage.ru_maxrss} * 1024;  // Linux counts in KiB
    return {bytes, bytes, bytes};
  }
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(device.type());
  const auto stats = allocator->getDeviceStats(device.index());
  const auto [free_bytes, total_bytes] = allocator->getMemoryInfo(device.index());
  return {.peak_bytes = stats.allocated_bytes[kAll].peak,
          .reserved_bytes = stats.reserved_bytes[kAll].peak,
          .in_use_bytes = static_cast<int64_t>(total_bytes - free_bytes)};
}

// Lets go of what the allocator keeps without need, and of the peaks so far.
inline void forget_peak(c10::Device device) {
  if (device.is_cpu()) return;
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(device.type());
  allocator->emptyCache();
  allocator->resetPeakStats(device.index());
}

}  // namespace bench
