// Watches collectives that are under way on a device, where no host thread waits for them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <variant>

#include "fsdp/comm/operation.h"
#include "fsdp/comm/stream_mark.h"

namespace fsdp {

// A thread looks at them a few times a second, without calls of CUDA (stream_mark.h). What takes
// longer than the deadline, or what `trouble` tells of in the meantime, is reported once; nothing
// is watched after that.
class DeviceWatch {
 public:
  struct Callbacks {
    std::function<std::string()> trouble;             // words, thrown or not; "" if all is well
    std::function<void(const std::string&)> on_fail;  // called by the watching thread
  };

  DeviceWatch(double timeout_seconds, Callbacks callbacks);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // What one stream does, in its order; each ends at its mark.
  void add(const Fingerprint& operation, StreamMark end);
  // Something else, by its name.
  void add(std::string what, StreamMark end);

  // "; under way was ...", or "".
  std::string under_way();

  // Returns when everything has ended, or when the watch has reported.
  void wait_for_the_end();

 private:
  struct Entry {
    std::variant<Fingerprint, std::string> what;
    StreamMark end;
    std::chrono::steady_clock::time_point since;

    std::string text() const;
  };

  void push(Entry entry);
  void watch();
  // Words about what is wrong, or "". Forgets what has ended.
  std::string look();
  std::string trouble() const;
  // The caller holds mutex_.
  void forget_what_has_ended();

  const double timeout_seconds_;
  const Callbacks callbacks_;
  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  std::deque<Entry> entries_;  // oldest first
  bool stopping_ = false;
  bool has_reported_ = false;
  std::thread thread_;  // started by the first operation
};

}  // namespace fsdp
