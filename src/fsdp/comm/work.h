// What an enqueued collective or update returns: something to wait on, the same on CPUs and on
// devices.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "fsdp/comm/tensors_in_use.h"

namespace fsdp {

class OperationQueue;

// The shared end of a Work: written once by whoever runs the operation, read by whoever waits.
class WorkState {
 public:
  // Without a queue nobody can lend a hand: waiting is sleeping.
  explicit WorkState(OperationQueue* queue = nullptr) : queue_(queue) {}

  void finish(std::optional<c10::Event> event);
  // Done on the device where `stream` is now. A state that is used again records the event it has.
  void finish_on(const c10::Stream& stream);
  void fail(std::exception_ptr error);

  // Of an operation that runs on a device; before it is finished.
  void keep_tensors_of(std::shared_ptr<Operation> operation) { in_use_.keep(std::move(operation)); }

  // Nobody holds a Work of the operation any more.
  void close() noexcept { in_use_.leave_to_allocator(); }
  // Makes it ready for another operation. The last one's must be closed.
  void reopen();

  bool done() const { return done_.load(std::memory_order_acquire) != 0; }

  // Blocks until done, running queued operations meanwhile if nobody else does; then throws the
  // operation's error, if it had one.
  void wait();

 private:
  friend class Work;
  friend class OperationQueue;

  // Unlike wait(), touches nothing but this object: the queue may be on its way out.
  void sleep_until_done() const { done_.wait(0, std::memory_order_acquire); }
  void lend_a_hand_until_done() const;

  OperationQueue* const queue_;  // outlives the state's not being done
  std::atomic<int> done_{0};
  std::exception_ptr error_;         // read only after done_
  std::optional<c10::Event> event_;  // read only after done_; recorded when the device is done
  TensorsInUse in_use_;              // of an operation on a device
};

// wait() on CPU tensors: returns when the data is there. On device tensors: returns when the
// collective is on its stream, and makes the caller's current stream wait for it; the host does
// not (Note [Tensors in use] says who keeps the tensors until then). A failed operation throws from
// every wait(). Dropping a Work does not cancel anything; a later call on the same communicator
// reports an error nobody waited for.
class Work {
 public:
  Work() = default;  // already done
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  void wait() const;
  bool done() const { return state_ == nullptr || state_->done(); }

  // --- for those who run an operation that comes after this one ---

  // Blocks until this operation is done, leaving it to those who run it; throws its error.
  void wait_as_follower() const;
  // What marks its end on a device; nullptr when it has none. Only when done.
  const c10::Event* event() const;

 private:
  friend class OperationQueue;

  std::shared_ptr<WorkState> state_;
  // What this operation comes after, if anything: wait() lends a hand there too. No further back,
  // or a long chain of operations would never be freed.
  std::shared_ptr<WorkState> after_;
};

}  // namespace fsdp
