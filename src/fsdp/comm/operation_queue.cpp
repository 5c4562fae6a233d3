#include "fsdp/comm/operation_queue.h"

#include <ATen/record_function.h>

#include <chrono>
#include <utility>

#include "fsdp/base/log.h"
#include "fsdp/base/start_thread.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/comm_error.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// Waking a thread takes some microseconds, in which this much is copied or summed.
constexpr int64_t kQuickBytes = int64_t{64} << 10;

bool is_quick(const Operation& operation) {
  if (!operation.device().is_cpu()) return operation.after.done();  // no more than a few launches
  const bool small =
      !operation.output.defined() ||
      static_cast<int64_t>(operation.output.nbytes() + operation.input.nbytes()) <= kQuickBytes;
  return small && operation.after.done();
}

}  // namespace

OperationQueue::OperationQueue(std::string name, OperationRunner& runner,
                               const CommOptions& options)
    : name_(std::move(name)),
      runner_(runner),
      bandwidth_bytes_per_s_(options.bandwidth_bytes_per_s),
      exceptions_in_flight_(std::uncaught_exceptions()) {}

OperationQueue::~OperationQueue() {
  if (std::uncaught_exceptions() > exceptions_in_flight_) runner_.cancel();
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
  }
  queue_filled_.notify_one();
  if (worker_.joinable()) worker_.join();
}

Work OperationQueue::push(Operation operation) {
  auto shared = std::make_shared<Operation>(std::move(operation));
  auto state = std::make_shared<WorkState>(this);
  Work result(state);
  result.after_ = shared->after.state_;
  bool at_once = runner_.is_alone() && is_quick(*shared);
  {
    const std::lock_guard lock(queue_mutex_);
    if (!broken_.empty()) throw AbortedError(broken_);
    shared->print.sequence = next_sequence_++;
    at_once = at_once && entries_.empty();
    entries_.push_back({std::move(shared), std::move(state)});
    if (!at_once) start_worker();
  }
  if (at_once) {
    if (const std::unique_lock running(running_, std::try_to_lock); running) {
      run_next();
      return result;
    }
    const std::lock_guard lock(queue_mutex_);
    start_worker();
  }
  queue_filled_.notify_one();
  return result;
}

void OperationQueue::start_worker() {
  if (worker_.joinable()) return;
  worker_ = start_thread(concat("collectives of communicator '", name_, "'"),
                         [this, rank = thread_rank()] {
                           set_thread_rank(rank);
                           work();
                         });
}

void OperationQueue::help_until_done(const WorkState& state) {
  while (!state.done()) {
    std::unique_lock running(running_, std::try_to_lock);
    // Somebody else is running operations and, being in order, will come to this one.
    if (!running || !run_next()) {
      if (running) running.unlock();
      state.sleep_until_done();
      return;
    }
  }
}

void OperationQueue::work() {
  const std::chrono::duration<double> idle_period(runner_.idle_seconds());
  std::unique_lock lock(queue_mutex_);
  while (true) {
    const auto has_news = [this] { return stopping_ || !entries_.empty(); };
    if (idle_period.count() > 0) {
      if (!queue_filled_.wait_for(lock, idle_period, has_news)) {
        lock.unlock();
        if (const std::unique_lock running(running_, std::try_to_lock); running) runner_.idle();
        lock.lock();
        continue;
      }
    } else {
      queue_filled_.wait(lock, has_news);
    }
    if (entries_.empty()) return;  // stopping, and nothing is left
    lock.unlock();
    {
      const std::lock_guard running(running_);
      while (run_next()) {
      }
    }
    lock.lock();
  }
}

bool OperationQueue::run_next() {
  Queued entry;
  std::string broken;
  {
    const std::lock_guard lock(queue_mutex_);
    if (entries_.empty()) return false;
    entry = std::move(entries_.front());
    entries_.pop_front();
    broken = broken_;
  }
  if (broken.empty()) {
    run_entry(entry);
  } else {
    entry.state->fail(std::make_exception_ptr(AbortedError(broken)));
  }
  return true;
}

void OperationQueue::follow(const Operation& operation) {
  operation.after.wait_as_follower();
  const c10::Event* event = operation.after.event();
  // On a device the runner makes its stream wait.
  if (event != nullptr && operation.device().is_cpu()) event->synchronize();
}

// CPU tensors only: a device's collective ends on its stream, which does not see the host sleep.
void OperationQueue::sleep_while_data_would_move(const Operation& operation) const {
  if (!operation.device().is_cpu()) return;
  const std::chrono::duration<double> transfer(static_cast<double>(operation.received_bytes) /
                                               bandwidth_bytes_per_s_);
  std::this_thread::sleep_until(operation.moves_since +
                                std::chrono::ceil<Clock::duration>(transfer));
}

void OperationQueue::run_entry(Queued& entry) {
  std::optional<c10::Event> event;
  try {
    follow(*entry.operation);
    // For profilers: "fsdp::comm all_gather blocks.3". The name is made only if one listens.
    at::RecordFunction range(at::RecordScope::FUNCTION);
    std::string range_name;
    if (range.isActive()) {
      const Fingerprint& print = entry.operation->print;
      range_name = concat("fsdp::comm ", name_of(print.kind), " ", print.tag.text());
      range.before(std::string_view(range_name), c10::ArrayRef<const c10::IValue>());
    }
    if (bandwidth_bytes_per_s_ > 0) entry.operation->moves_since = Clock::now();
    event = runner_.run(entry.operation);
    if (bandwidth_bytes_per_s_ > 0) sleep_while_data_would_move(*entry.operation);
    if (event) {
      entry.state->keep_tensors_of(std::move(entry.operation));
    } else {
      entry.operation.reset();  // before the waiter wakes up, which may count references
    }
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(queue_mutex_);
      if (broken_.empty())
        broken_ = concat("communicator '", name_, "' stopped working: ", error.what());
    }
    entry.state->fail(std::current_exception());
    return;
  }
  entry.state->complete(std::move(event));
}

}  // namespace fsdp
