#include "fsdp/optim/task_queue.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/log.h"
#include "fsdp/base/start_thread.h"

namespace fsdp {

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void wait_on_host(const Work& work) {
  work.wait_as_follower();
  if (const c10::Event* event = work.event()) event->synchronize();
}

TaskQueue::TaskQueue(c10::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = new_stream(device);
}

TaskQueue::~TaskQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

Work TaskQueue::run(Task task, std::span<const Work> after, std::shared_ptr<WorkState> state) {
  if (stream_) {
    run_on_stream(task, after, *state);
    return Work(std::move(state));
  }
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(task), {after.begin(), after.end()}, state});
    start_worker();
  }
  changed_.notify_all();
  return Work(std::move(state));
}

void TaskQueue::run_on_stream(const Task& task, std::span<const Work> after, WorkState& state) {
  try {
    if (broken_) std::rethrow_exception(broken_);
    follow(*stream_, current_stream(device_));
    const c10::StreamGuard guard(*stream_);
    for (const Work& work : after) work.wait();  // makes the queue's stream wait
    task();
    c10::Event ended(device_.type());
    ended.record(*stream_);
    state.complete(std::move(ended));
  } catch (...) {
    broken_ = std::current_exception();
    state.fail(broken_);
  }
}

void TaskQueue::start_worker() {
  if (worker_.joinable()) return;
  worker_ = start_thread("the optimizer's updates", [this, rank = thread_rank()] {
    set_thread_rank(rank);
    work();
  });
}

void TaskQueue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    QueuedTask queued = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run_queued(queued);
    queued = {};
    lock.lock();
  }
}

void TaskQueue::run_queued(QueuedTask& queued) {
  try {
    if (broken_) std::rethrow_exception(broken_);
    for (const Work& work : queued.after) wait_on_host(work);
    queued.task();
    queued.state->complete(std::nullopt);
  } catch (...) {
    broken_ = std::current_exception();
    queued.state->fail(broken_);
  }
}

}  // namespace fsdp
