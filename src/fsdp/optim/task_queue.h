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

#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/operation.h"

namespace fsdp {

// A stream of the device's pool.
c10::Stream new_stream(c10::Device device);

// Blocks the calling thread until the work's data is there, instead of ordering a stream.
void wait_on_host(const Work& work);

// On the CPU a worker thread runs the tasks. On a device the caller's host thread runs them at
// once, with the queue's stream as the current one, so a task is a few kernel launches. In both
// cases a task comes after `after`, after everything queued on the caller's current stream, and
// after the queue's earlier tasks; only callers that ask for it wait.
//
// The first failed task breaks the queue: every later one fails with its error.
class TaskQueue {
 public:
  using Task = std::function<void()>;

  explicit TaskQueue(c10::Device device);
  ~TaskQueue();  // waits for all tasks
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // `state` becomes done or failed with the task, for callers that already wait for it.
  Work run(Task task, std::span<const Work> after = {},
           std::shared_ptr<WorkState> state = std::make_shared<WorkState>());

 private:
  struct QueuedTask {
    Task task;
    std::vector<Work> after;
    std::shared_ptr<WorkState> state;
  };

  void run_on_stream(const Task& task, std::span<const Work> after, WorkState& state);
  void start_worker();
  void work();
  void run_queued(QueuedTask& queued);

  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // devices only

  std::mutex mutex_;  // protects the members below
  std::condition_variable changed_;
  std::deque<QueuedTask> queue_;
  bool stopping_ = false;

  std::exception_ptr broken_;  // the first error; used by the thread that runs tasks
  std::thread worker_;         // started by the first task
};

}  // namespace fsdp
