// The shared end of a Work: who completes it, who keeps the operation's tensors until a device has
// ended it, and states that are used again.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/comm/work.h"

namespace fsdp {

struct Operation;

// Note [Tensors in use]
// On a device an operation has only been launched when its Work is done: it ends on a stream of its
// communicator, of which libtorch's allocator knows nothing. If the last reference to a tensor went
// before that, the allocator would give its memory to the next allocation on the stream where it
// was allocated, and that stream would not wait. So the Work keeps the tensors until
//   - Work::wait() has made the stream wait on which the operation was called: later uses of the
//     memory, in that stream's order, come after the operation; or
//   - the last Work goes, with no such wait: then the allocator is told that the communicator's
//     stream uses the memory, and waits for that stream before it gives it to anybody.
// Nobody asks the device anything, so that it is right for a step that is being recorded, too.
// Memory that is not the allocator's (at::from_blob) is its owner's to keep.
//
// Keeps the tensors of one such operation.
class TensorsInUse {
 public:
  TensorsInUse() = default;
  ~TensorsInUse() { release_to_allocator(); }
  TensorsInUse(const TensorsInUse&) = delete;
  TensorsInUse& operator=(const TensorsInUse&) = delete;

  // An operation that has been launched on its `runs_on`.
  void keep(std::shared_ptr<Operation> operation);

  // Releases the tensors if the operation was called on `stream`, which waits for its end now.
  // Several threads may call it at once.
  void release_if_called_on(const c10::Stream& stream);

  // Leaves the tensors to the allocator: nobody will wait for the operation any more. No other
  // thread may call the functions above meanwhile.
  void release_to_allocator() noexcept;

 private:
  std::shared_ptr<Operation> operation_;
  std::atomic<bool> keeps_{false};  // the thread that clears it may touch operation_
};

class OperationQueue;

// The shared end of a Work: written once by the thread that runs the operation, read by
// those that wait.
class WorkState {
 public:
  // Without a queue nobody can lend a hand: waiting is sleeping.
  explicit WorkState(OperationQueue* queue = nullptr) : queue_(queue) {}

  void complete(std::optional<c10::Event> event);
  // Done on the device where `stream` is now. A state that is used again records the event it has.
  void complete_on(const c10::Stream& stream);
  void fail(std::exception_ptr error);

  // Of an operation that runs on a device; before it is complete.
  void keep_tensors_of(std::shared_ptr<Operation> operation) { in_use_.keep(std::move(operation)); }

  // Releases the tensors: nobody holds a Work of the operation any more.
  void release() noexcept { in_use_.release_to_allocator(); }
  // Makes it ready for another operation. The tensors of the last one must have been released.
  void reset();

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

  OperationQueue* const queue_;  // outlives every state that is not done
  std::atomic<int> done_{0};
  std::exception_ptr error_;         // read only after done_
  std::optional<c10::Event> event_;  // read only after done_; recorded when the device is done
  TensorsInUse in_use_;              // of an operation on a device
};

// States of operations on a device that are used again and again, each with its event: an event
// costs more to make than to record, and a step has hundreds of operations. Thread-safe;
// a state may outlive the pool.
class WorkPool {
 public:
  // A state that is not done; it returns to the pool when nobody holds it any more.
  std::shared_ptr<WorkState> take();

 private:
  struct Spares {
    std::mutex mutex;  // protects the member below
    std::vector<std::unique_ptr<WorkState>> states;
  };

  const std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
};

}  // namespace fsdp
