// Keeps the tensors of an operation that a device has been given and may not have ended yet.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <memory>

namespace fsdp {

struct Operation;

// Note [Tensors in use]
// On a device an operation has only been launched when its Work is done: it ends on a stream of its
// communicator, of which libtorch's allocator knows nothing. Were the last reference to a tensor to
// go before that, the allocator would give its memory to whoever asks next on the stream where it
// was allocated, and that one would not wait. So the Work keeps the tensors until
//   - Work::wait() has made the stream wait on which the operation was called: whoever gets the
//     memory in that stream's order comes after the operation; or
//   - the last Work goes, with no such wait: then the allocator is told that the communicator's
//     stream uses the memory, and waits for that stream before it gives it to anybody.
// Nobody asks the device anything, so that it is right for a step that is being recorded, too.
// Memory that is not the allocator's (at::from_blob) is its owner's to keep.
class TensorsInUse {
 public:
  TensorsInUse() = default;
  ~TensorsInUse() { leave_to_allocator(); }
  TensorsInUse(const TensorsInUse&) = delete;
  TensorsInUse& operator=(const TensorsInUse&) = delete;

  // An operation that has been launched on its `runs_on`.
  void keep(std::shared_ptr<Operation> operation);

  // `stream` waits for the operation's end. Several threads may say so at once.
  void let_go_if_called_on(const c10::Stream& stream);

  // Nobody will wait. Not while others may call the above.
  void leave_to_allocator() noexcept;

 private:
  std::shared_ptr<Operation> operation_;
  std::atomic<bool> keeps_{false};  // whoever takes it away may touch operation_
};

}  // namespace fsdp
