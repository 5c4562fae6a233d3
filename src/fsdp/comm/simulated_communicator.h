// The `simulated` backend: a world of any size seen from one rank; moves nothing, records every
// call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"

namespace fsdp {

struct RecordedCall {
  std::string communicator;
  int ranks = 0;
  Fingerprint print;
};

// Shared by a simulated communicator and everything split from it, in the order of the calls.
using Recording = std::vector<RecordedCall>;

// Checks arguments like every backend, so a dry run finds wrong sizes; outputs stay as they are.
class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(int rank, int size, std::string name, std::shared_ptr<Recording> recording);

  std::unique_ptr<Communicator> split(std::span<const int> colors, std::string name) override;
  void abort(const std::string& message) override;

 private:
  Work enqueue(Operation operation) override;

  const std::shared_ptr<Recording> recording_;
  uint64_t next_sequence_ = 0;
};

}  // namespace fsdp
