// The `threads` backend: ranks are threads of one process and read each other's memory directly.
#pragma once

#include <memory>
#include <string>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/operation_queue.h"
#include "fsdp/comm/threads/device_ranks.h"
#include "fsdp/comm/threads/rendezvous.h"

namespace fsdp {

// CPU tensors: each rank copies or sums straight out of its peers' tensors, no staging. Device
// tensors: the same on this communicator's stream, ordered by events; the host only exchanges
// pointers and never waits for a device.
class ThreadsCommunicator final : public Communicator, private OperationRunner {
 public:
  ThreadsCommunicator(int rank, std::shared_ptr<Rendezvous> rendezvous);

  std::unique_ptr<Communicator> split(std::span<const int> colors, std::string name) override;
  void abort(const std::string& message) override;
  void throw_if_aborted() override { rendezvous_->abort().throw_if_raised(); }
  Work enqueue(Operation operation) override;
  std::string why_not_recorded() const override {
    return size() == 1 ? "" : "which are threads of one process and read each other's memory";
  }

 private:
  std::optional<c10::Event> run(const std::shared_ptr<Operation>& operation) override;
  std::optional<c10::Event> run_met(Operation& operation);
  bool is_alone() const override { return size() == 1; }
  void cancel() noexcept override;

  void run_on_host(Operation& operation);
  void all_gather_on_host(Operation& operation);
  void reduce_share_on_host(Operation& operation, at::Tensor& output);
  void all_to_all_on_host(Operation& operation);
  void broadcast_on_host(Operation& operation);

  const std::shared_ptr<Rendezvous> rendezvous_;
  DeviceSide device_side_;  // device tensors only
  uint64_t num_splits_ = 0;
  OperationQueue queue_;  // last: its worker uses everything above
};

}  // namespace fsdp
