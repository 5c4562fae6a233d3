// Watches collectives that are under way on a device, where no host thread waits for them, without
// asking the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "fsdp/comm/operation.h"

namespace fsdp {

// A place in the work of a device's stream, which the host can look for without asking the device.
class StreamMark {
 public:
  bool is_reached() const;

 private:
  friend class StreamMarks;
  StreamMark(const uint32_t* reached, uint32_t number) : reached_(reached), number_(number) {}
  explicit StreamMark(std::shared_ptr<c10::Event> event) : event_(std::move(event)) {}

  const uint32_t* reached_ = nullptr;
  uint32_t number_ = 0;
  std::shared_ptr<c10::Event> event_;  // for drivers that cannot write numbers
};

// Note [Asking a device that is stuck]
// While a launch waits for room on a stream that stands still, other calls of CUDA wait with it,
// a query of an event among them. A thread that watches for such a stream must not call CUDA, so
// the stream itself writes numbers to the host's memory as it comes past them.
//
// It belongs to one stream and must outlive its marks.
class StreamMarks {
 public:
  StreamMarks();

  // A mark behind everything that was enqueued on the stream until now.
  StreamMark next(const c10::cuda::CUDAStream& stream);

 private:
  at::Tensor reached_;  // the last number the stream came past; in page-locked memory
  uint32_t number_ = 0;
};

// A thread looks at them a few times a second, without calls of CUDA (StreamMark). What takes
// longer than the deadline, or what `trouble` tells of in the meantime, is reported once; nothing
// is watched after that.
class DeviceWatch {
 public:
  struct Callbacks {
    std::function<std::string()> trouble;  // what is wrong, returned or thrown; "": nothing
    std::function<void(const std::string&)> on_fail;  // called by the watching thread
  };

  DeviceWatch(double timeout_seconds, Callbacks callbacks);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // Watches an operation whose end is at that mark. Operations of one stream are added in its
  // order.
  void add(const Fingerprint& operation, StreamMark end);
  // Adds what is no collective and is known by a name.
  void add(std::string what, StreamMark end);

  // "; under way was ...", or "".
  std::string under_way();

  // Returns when everything has ended, or when the watch has reported.
  void wait();

 private:
  struct Watched {
    std::variant<Fingerprint, std::string> what;
    StreamMark end;
    std::chrono::steady_clock::time_point since;

    std::string text() const;
  };

  void push(Watched entry);
  void watch();
  // Words about what is wrong, or "". Removes what has ended.
  std::string look();
  std::string trouble() const;
  // The caller holds mutex_.
  void remove_ended();

  const double timeout_seconds_;
  const Callbacks callbacks_;
  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  std::deque<Watched> entries_;  // oldest first
  bool stopping_ = false;
  bool has_reported_ = false;
  std::thread thread_;  // started by the first operation
};

}  // namespace fsdp
