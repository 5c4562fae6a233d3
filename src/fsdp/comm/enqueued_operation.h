// One collective as data: what is asked for, on which tensors, and how these are divided among
// ranks; and the shared end of its Work: who completes it, who keeps the tensors until a device has
// ended it, and states that are used again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/comm/operation.h"

namespace fsdp {

// How the elements of one flat tensor are divided among the ranks of a communicator. Equal shares
// need no memory of their own, so that the everyday case allocates nothing.
class Shares {
 public:
  Shares() = default;

  // Every rank has `numel_per_rank`.
  static Shares equal(int64_t numel_per_rank, int ranks);

  // Rank r has `counts[r]`; zero is fine.
  static Shares uneven(std::span<const int64_t> counts);

  // `numel` cut into pieces of equal size except the last ones, each piece starting at a multiple
  // of `multiple`: how an all-reduce is divided into work for each rank.
  static Shares cut(int64_t numel, int ranks, int64_t multiple);

  int64_t count(int rank) const { return end(rank) - offset(rank); }
  int64_t offset(int rank) const;
  int64_t total() const { return ranks_ == 0 ? 0 : end(ranks_ - 1); }
  int64_t largest() const;
  int ranks() const { return ranks_; }
  bool is_equal() const { return ends_.empty(); }

 private:
  int64_t end(int rank) const;

  int ranks_ = 0;
  int64_t equal_count_ = 0;
  std::vector<int64_t> ends_;  // running sums; empty when the shares are equal
};

// The part that only operations on a device have. Apart from the others, which are moved faster
// without it.
struct OnDevice {
  c10::Stream called_on;                              // by the caller
  c10::Event ready;                                   // when that stream has produced the input
  std::optional<c10::Stream> runs_on = std::nullopt;  // set by the thread that runs it
};

// Where an element of a flat tensor is. A view of the tensor would cost more than a launch.
inline char* at_element(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         element * static_cast<int64_t>(tensor.element_size());
}

struct Operation {
  Fingerprint print;
  Reduction reduction;
  at::Tensor output;     // flat and contiguous; undefined for a barrier
  at::Tensor input;      // the same tensor as output for all_reduce and broadcast
  Shares input_shares;   // how input is divided among ranks (reduce_scatter, all_to_all)
  Shares output_shares;  // how output is divided among ranks (all_gather, all_to_all)

  Work after;  // of another communicator; this operation begins when it has ended

  // Bytes that this rank receives from others, and since when: a limited bandwidth makes it last.
  int64_t received_bytes = 0;
  std::chrono::steady_clock::time_point moves_since = {};

  std::unique_ptr<OnDevice> on_device;  // where tensors are on one

  at::Device device() const { return output.defined() ? output.device() : at::Device(at::kCPU); }
};

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

  // Keeps the tensors of an operation that runs on a device, before it is complete.
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

  void finish();
  // Unlike wait(), touches nothing but this object: the queue may be on its way out.
  void sleep_until_done() const { done_.wait(0, std::memory_order_acquire); }
  void help_run_until_done() const;

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

// A communicator's things on its device; all of it is made at its first use.
struct DeviceSide {
  std::optional<c10::Stream> stream;  // all copies and sums of this communicator
  at::Tensor workspace;               // of the sums
  bool has_copied = false;            // since the ranks met last

  c10::Stream stream_on(c10::Device device);
};

// Makes `ready` of a device operation mean: the caller's stream, or a copy before this operation,
// has produced the input, and what the operation comes after has ended.
void follow_on_device(Operation& operation, DeviceSide& side);

// Runs an OpKind::kCopy, which needs no other rank, on the host or on this communicator's stream.
std::optional<c10::Event> run_copy(Operation& operation, DeviceSide& side);

}  // namespace fsdp
