// Watches collectives that are under way on a device, where no host thread waits for them.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fsdp/comm/operation.h"

namespace fsdp {

// A thread looks at them a few times a second. What takes longer than the deadline, or what
// `trouble` tells of in the meantime, is reported once; nothing is watched after that.
class DeviceWatch {
 public:
  struct Callbacks {
    std::function<std::string()> trouble;             // words, or "" while all is well
    std::function<void(const std::string&)> on_fail;  // called by the watching thread
  };

  DeviceWatch(double timeout_seconds, Callbacks callbacks);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // The operation ends with `finished`; its tensors are kept until then.
  void add(std::shared_ptr<Operation> operation, std::shared_ptr<c10::Event> finished);

 private:
  struct Entry {
    std::shared_ptr<Operation> operation;
    std::shared_ptr<c10::Event> finished;
    std::chrono::steady_clock::time_point since;
  };

  void watch();
  // Words about what is wrong, or "". Forgets what has ended.
  std::string look();

  const double timeout_seconds_;
  const Callbacks callbacks_;
  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  std::deque<Entry> entries_;  // oldest first
  bool stopping_ = false;
  std::thread thread_;  // started by the first operation
};

}  // namespace fsdp
