// Runs the operations of one rank on one communicator, in order, beside the caller's own work.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/operation.h"

namespace fsdp {

// Carries operations out; one implementation per backend.
class OperationRunner {
 public:
  virtual ~OperationRunner() = default;

  // Carries one operation out. Returns the event that marks its end on a device, if it is one
  // there, and sets the stream on which it `runs_on`. Called by one thread at a time. An
  // implementation that fails while others may still use the operation's tensors keeps a reference
  // to it.
  virtual std::optional<c10::Event> run(const std::shared_ptr<Operation>& operation) = 0;

  // Whether there is no other rank, so that an operation never waits for anybody.
  virtual bool is_alone() const = 0;

  // Called now and then while there is nothing to do; by default nothing.
  virtual void idle() {}

  // The owner is being left by an exception: nothing enqueued can be completed any more, and nobody
  // may go on waiting for this rank.
  virtual void cancel() noexcept = 0;

  // Seconds between two idle() calls; 0 for never.
  virtual double idle_seconds() const { return 0; }
};

// Operations run in order, one at a time: by a worker thread, so that communication overlaps the
// caller's computation, or by a caller that waits for one nobody has begun, since waking the worker
// is most of the time of a small message. A rank that is alone runs small operations at once.
//
// The thread that runs an operation with an `after` sleeps until that one is done. It does not run
// that one itself, because the owner of the other queue may be closing it. No circle is possible:
// each operation comes after some that were enqueued before it.
//
// The first error breaks the queue: the ranks' orders no longer agree, so every later operation
// fails with its message.
class OperationQueue {
 public:
  OperationQueue(std::string name, OperationRunner& runner, const CommOptions& options);
  // Waits for what was enqueued (within its deadlines) or, on the way out of an exception, cancels
  // it; then stops the worker.
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // Fills in the operation's sequence number.
  Work push(Operation operation);

  // Runs queued operations, or waits for the thread that does, until `state` is done.
  void help_until_done(const WorkState& state);

 private:
  struct Queued {
    std::shared_ptr<Operation> operation;
    std::shared_ptr<WorkState> state;
  };

  // The caller holds queue_mutex_.
  void start_worker();
  void work();
  // Takes the oldest entry and runs it. Returns false when there was none. The caller holds
  // running_.
  bool run_next();
  void run_entry(Queued& entry);
  // Waits for what the operation comes after; throws its error.
  static void follow(const Operation& operation);
  void sleep_while_data_would_move(const Operation& operation) const;

  const std::string name_;
  OperationRunner& runner_;
  const double bandwidth_bytes_per_s_;
  const int exceptions_in_flight_;  // when constructed

  // Lock order: running_ before queue_mutex_.
  std::mutex running_;      // held while an operation runs: keeps the order
  std::mutex queue_mutex_;  // protects the members below
  std::condition_variable queue_filled_;
  std::deque<Queued> entries_;
  std::string broken_;  // what every call says after the first error; empty while all is well
  uint64_t next_sequence_ = 0;
  bool stopping_ = false;

  std::thread worker_;  // started by the first push: many communicators are never used
};

}  // namespace fsdp
