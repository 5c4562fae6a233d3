// Runs tasks in order beside the computation: on a thread of its own, or on a device's stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "fsdp/comm/work.h"

namespace fsdp {

// On the CPU tasks run on a worker thread. On a device the caller's host thread runs them at once,
// with the lane's stream as the current one, so a task is a few kernel launches. Either way what a
// task does comes after `after`, after what the caller's current stream had queued, and after the
// lane's earlier tasks; and nobody waits who does not ask for it.
//
// The first failed task breaks the lane: every later one fails with its error.
class Lane {
 public:
  using Task = std::function<void()>;

  explicit Lane(c10::Device device);
  ~Lane();  // finishes what was begun
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // `state` becomes done or failed with the task, for those who wait for it already.
  Work run(Task task, std::span<const Work> after = {},
           std::shared_ptr<WorkState> state = std::make_shared<WorkState>());

 private:
  struct Entry {
    Task task;
    std::vector<Work> after;
    std::shared_ptr<WorkState> state;
  };

  void run_on_stream(const Task& task, std::span<const Work> after, WorkState& state);
  void start_worker();
  void work();
  void run_entry(Entry& entry);

  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // devices only

  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  bool stopping_ = false;

  std::exception_ptr broken_;  // by the first error; whoever runs tasks reads and writes it
  std::thread worker_;         // started by the first task
};

}  // namespace fsdp
