// What an enqueued collective or update returns: something to wait on, the same on CPUs and on
// devices.
#pragma once

#include <memory>
#include <utility>

namespace c10 {
struct Event;
}

namespace fsdp {

class OperationQueue;
class WorkState;

// wait() on CPU tensors: returns when the data is there. On device tensors: returns when the
// collective is on its stream, and makes the caller's current stream wait for it; the host does
// not (Note [Tensors in use] in work_state.h says who keeps the tensors until then). A failed
// operation throws from every wait(). Dropping a Work does not cancel anything; a later call on the
// same communicator reports an error nobody waited for.
class Work {
 public:
  Work() = default;  // already done
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  void wait() const;
  bool done() const;

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
