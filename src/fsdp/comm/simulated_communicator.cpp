#include "fsdp/comm/simulated_communicator.h"

#include <algorithm>
#include <utility>

#include "fsdp/comm/comm_error.h"

namespace fsdp {

SimulatedCommunicator::SimulatedCommunicator(int rank, int size, std::string name,
                                             std::shared_ptr<Recording> recording)
    : Communicator(rank, size, std::move(name)), recording_(std::move(recording)) {}

Work SimulatedCommunicator::enqueue(Operation operation) {
  if (operation.print.kind == OpKind::kCopy) return Work();  // no rank would see it
  operation.print.sequence = next_sequence_++;
  recording_->push_back({name(), size(), operation.print});
  return Work();
}

std::unique_ptr<Communicator> SimulatedCommunicator::split(std::span<const int> colors,
                                                           std::string name) {
  const std::vector<int> members = members_of(colors);
  const auto position = std::find(members.begin(), members.end(), rank()) - members.begin();
  return std::make_unique<SimulatedCommunicator>(
      static_cast<int>(position), static_cast<int>(members.size()), std::move(name), recording_);
}

void SimulatedCommunicator::abort(const std::string& message) { throw AbortedError(message); }

}  // namespace fsdp
