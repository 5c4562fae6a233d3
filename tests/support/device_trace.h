// The work of a device and the host's calls for it, by libtorch's own profiler: kernels and copies
// with their streams and times, and the calls of CUDA's runtime.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/comm/world.h"

namespace fsdp::testing {

// A kernel, copy or fill on the device.
struct DeviceSpan {
  std::string name;
  int64_t stream = 0;
  double begin_us = 0;
  double end_us = 0;
  int64_t bytes = 0;  // of copies

  bool is_named(std::string_view part) const { return name.find(part) != std::string::npos; }
};

// A call of CUDA's runtime or driver.
struct HostCall {
  std::string name;
  int64_t thread = 0;
  double begin_us = 0;
};

class DeviceTrace {
 public:
  DeviceTrace() = default;
  DeviceTrace(std::vector<DeviceSpan> spans, std::vector<HostCall> calls);

  const std::vector<DeviceSpan>& spans() const { return spans_; }

  // Streams with at least one span that `is_wanted`.
  using Filter = std::function<bool(const DeviceSpan&)>;
  std::set<int64_t> streams_of(const Filter& is_wanted) const;
  std::set<int64_t> streams() const;
  int64_t count(const Filter& is_wanted) const;
  int64_t bytes(const Filter& is_wanted) const;

  // Microseconds in which at least one of these streams is busy, and in which both sets are.
  double busy_us(const std::set<int64_t>& streams) const;
  double busy_together_us(const std::set<int64_t>& some, const std::set<int64_t>& others) const;

  // How many of the spans that `is_wanted` run at least partly while one of these streams is busy:
  // kernels that fill the device push each other aside.
  int64_t count_beside(const Filter& is_wanted, const std::set<int64_t>& streams) const;

  // Calls that make a host thread wait for the device, or ask the driver for memory, from the first
  // launch to the last: later calls only end the trace.
  std::vector<HostCall> waits() const;
  std::vector<HostCall> allocations() const;

  // Threads that launch kernels, and not copies alone.
  std::set<int64_t> launching_threads() const;

  // Every stream with its spans, and every call with its count: for a failed test.
  std::string text() const;

 private:
  std::vector<HostCall> calls_between_launches(const std::function<bool(const HostCall&)>&) const;

  std::vector<DeviceSpan> spans_;
  std::vector<HostCall> calls_;
};

// Whether libtorch names the kernel as a matrix product or attention.
bool is_computing(const DeviceSpan& span);
bool is_device_copy(const DeviceSpan& span);

// Traces `body` on all ranks until the device has done its work. All ranks call it; rank 0 has the
// trace.
DeviceTrace trace_device(World& world, const std::function<void()>& body);

}  // namespace fsdp::testing
