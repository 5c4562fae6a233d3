// The `threads` backend: ranks are threads of one process and read each other's memory directly.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/operation.h"
#include "fsdp/comm/operation_queue.h"

namespace fsdp {

// Progress is one counter per rank. `sync` raises the caller's counter and waits until everybody
// else's has caught up; each counter has one writer, and what a rank wrote before its sync is
// visible to all after theirs. So a rank may read its peers' operations, and the memory they point
// to, between two syncs, and nobody's tensors are touched after the last sync of an operation.
class Rendezvous {
 public:
  Rendezvous(std::string name, int ranks, const CommOptions& options,
             std::shared_ptr<AbortSignal> abort);

  int ranks() const { return static_cast<int>(seats_.size()); }
  const std::string& name() const { return name_; }
  const CommOptions& options() const { return options_; }
  AbortSignal& abort() { return *abort_; }

  // Shows `operation` to the others, waits for theirs and compares: an Error with both sides on
  // every rank if they differ. `operation` stays readable by others until the operation's last
  // sync.
  void meet(int rank, Operation& operation);

  // Waits until every rank has come to its sync. Throws at the deadline, naming who is missing, and
  // makes the others fail too; throws when the signal is raised.
  void sync(int rank);

  // A failing rank's operation, which others may be reading: stays until this meeting place ends.
  void keep(std::shared_ptr<Operation> operation);

  // The operation that `rank` showed; valid between meet and the last sync.
  Operation& of(int rank) { return *seats_[static_cast<size_t>(rank)].operation; }

  // The meeting place of this rank's group in its `number`-th split; all members get the same one.
  std::shared_ptr<Rendezvous> child(uint64_t number, std::span<const int> colors, int color,
                                    size_t members, const std::string& name);

 private:
  // Each on its own cache lines: a waiting rank must not slow the one it waits for.
  struct alignas(128) Seat {
    std::atomic<uint64_t> progress{0};
    Operation* operation = nullptr;
    // Apart from the operation, so that a rank that fails and is gone can still be compared with.
    Fingerprint print;
  };
  struct Child {
    std::vector<int> colors;
    std::shared_ptr<Rendezvous> rendezvous;
    size_t still_to_come = 0;
  };

  bool all_at(uint64_t progress) const;
  void wait_for_all(int rank, uint64_t progress);
  [[noreturn]] void throw_late(int rank, uint64_t progress);

  const std::string name_;
  const CommOptions options_;
  const int spins_;
  const std::shared_ptr<AbortSignal> abort_;
  std::vector<Seat> seats_;

  std::mutex sleep_mutex_;
  std::condition_variable arrived_;
  std::atomic<int> sleepers_{0};

  std::mutex mutex_;  // protects the members below
  std::vector<std::shared_ptr<Operation>> kept_;
  std::map<std::pair<uint64_t, int>, Child> children_;
};

// CPU tensors: each rank copies or sums straight out of its peers' tensors, no staging. Device
// tensors: the same on this communicator's stream, ordered by events; the host only exchanges
// pointers and never waits for a device.
class ThreadsCommunicator final : public Communicator, private OperationRunner {
 public:
  ThreadsCommunicator(int rank, std::shared_ptr<Rendezvous> rendezvous, int sum_group);

  void abort(const std::string& message) override;
  void throw_if_aborted() override { rendezvous_->abort().throw_if_raised(); }
  Work enqueue(Operation operation) override;
  std::string why_not_recorded() const override {
    return size() == 1 ? "" : "which are threads of one process and read each other's memory";
  }

 private:
  std::unique_ptr<Communicator> split_off(Subgroup part) override;
  std::optional<c10::Event> run(const std::shared_ptr<Operation>& operation) override;
  std::optional<c10::Event> run_met(Operation& operation);
  bool is_alone() const override { return size() == 1; }
  void cancel() noexcept override;

  size_t group() const;  // ReduceRange::group
  void run_on_host(Operation& operation);
  // Enqueues this rank's part on the communicator's stream and returns the event after which the
  // result is there and nobody reads this rank's tensors any more. The host waits for the other
  // ranks' threads, never for a device.
  c10::Event run_on_device(Operation& operation);

  const std::shared_ptr<Rendezvous> rendezvous_;
  DeviceSide device_side_;  // device tensors only
  uint64_t num_splits_ = 0;
  OperationQueue queue_;  // last: its worker uses everything above
};

}  // namespace fsdp
