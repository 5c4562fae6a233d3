#include "fsdp/comm/threads/threads_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/reduce/reduce_ranks.h"

namespace fsdp {

namespace {

const char* read_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<const char*>(tensor.const_data_ptr()) + element * tensor.element_size();
}

char* write_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + element * tensor.element_size();
}

void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// What each rank sends to each must be what that one expects; the counts are not in the
// fingerprint, as they differ from rank to rank. Every rank checks every pair, so that all fail
// together. Returns the error's words, or "".
std::string mismatching_counts(Rendezvous& rendezvous) {
  for (int from = 0; from < rendezvous.ranks(); ++from) {
    for (int to = 0; to < rendezvous.ranks(); ++to) {
      const int64_t sent = rendezvous.of(from).input_shares.count(to);
      const int64_t expected = rendezvous.of(to).output_shares.count(from);
      if (sent != expected)
        return concat("ranks of '", rendezvous.name(), "' disagree at ",
                      rendezvous.of(from).print.text(), ": rank ", from, " sends ", sent,
                      " elements to rank ", to, ", which expects ", expected);
    }
  }
  return "";
}

}  // namespace

ThreadsCommunicator::ThreadsCommunicator(int rank, std::shared_ptr<Rendezvous> rendezvous)
    : Communicator(rank, rendezvous->ranks(), rendezvous->name()),
      rendezvous_(std::move(rendezvous)),
      queue_(rendezvous_->name(), *this, rendezvous_->options()) {}

Work ThreadsCommunicator::enqueue(Operation operation) { return queue_.push(std::move(operation)); }

std::unique_ptr<Communicator> ThreadsCommunicator::split(std::span<const int> colors,
                                                         std::string name) {
  const std::vector<int> members = members_of(colors);
  const auto position = std::find(members.begin(), members.end(), rank()) - members.begin();
  auto child = rendezvous_->child(num_splits_++, colors, colors[static_cast<size_t>(rank())],
                                  members.size(), name);
  return std::make_unique<ThreadsCommunicator>(static_cast<int>(position), std::move(child));
}

void ThreadsCommunicator::abort(const std::string& message) { rendezvous_->abort().raise(message); }

void ThreadsCommunicator::cancel() noexcept {
  rendezvous_->abort().raise_unexplained(
      concat("rank ", rank(), " of '", name(), "' was left by an exception"), thread_rank());
}

std::optional<c10::Event> ThreadsCommunicator::run(const std::shared_ptr<Operation>& operation) {
  rendezvous_->abort().throw_if_raised();
  if (operation->print.kind == OpKind::kCopy) return run_copy(*operation, device_side_);
  try {
    if (!operation->device().is_cpu()) follow_on_device(*operation, device_side_);
    rendezvous_->meet(rank(), *operation);
    operation->moves_since = std::chrono::steady_clock::now();
    return run_met(*operation);
  } catch (const AbortedError&) {
    rendezvous_->keep(operation);
    throw;
  } catch (const std::exception& error) {
    rendezvous_->keep(operation);
    // The others may be waiting for this rank's next step, which will not come.
    abort(concat("rank ", rank(), " of '", name(), "' failed: ", error.what()));
    throw;
  }
}

std::optional<c10::Event> ThreadsCommunicator::run_met(Operation& operation) {
  if (operation.print.kind == OpKind::kAllToAll) {
    const std::string mismatch = mismatching_counts(*rendezvous_);
    rendezvous_->sync(rank());  // until here others read this rank's counts
    if (!mismatch.empty()) throw CommError(mismatch);
  }
  if (!operation.device().is_cpu())
    return run_on_device(*rendezvous_, rank(), operation, device_side_);
  run_on_host(operation);
  rendezvous_->sync(rank());  // until here others read this rank's tensors
  return std::nullopt;
}

void ThreadsCommunicator::run_on_host(Operation& operation) {
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      return all_gather_on_host(operation);
    case OpKind::kReduceScatter:
      return reduce_share_on_host(operation, operation.output);
    case OpKind::kAllReduce: {
      // Share r is read by rank r alone, so r may write it in place before the others have finished
      // theirs; then everybody collects the finished shares.
      const Shares& shares = operation.output_shares;
      at::Tensor share =
          operation.output.view(-1).narrow(0, shares.offset(rank()), shares.count(rank()));
      reduce_share_on_host(operation, share);
      rendezvous_->sync(rank());
      return all_gather_on_host(operation);
    }
    case OpKind::kAllToAll:
      return all_to_all_on_host(operation);
    case OpKind::kBroadcast:
      return broadcast_on_host(operation);
    case OpKind::kBarrier:
    case OpKind::kCopy:
      return;
  }
}

void ThreadsCommunicator::all_gather_on_host(Operation& operation) {
  const Shares& shares = operation.output_shares;
  const int64_t width = operation.output.element_size();
  const bool shares_lie_in_inputs = operation.print.kind == OpKind::kAllReduce;
  for (int step = 0; step < size(); ++step) {
    // Everybody starts with its own share: two ranks never read the same memory at the same time.
    const int from = (rank() + step) % size();
    const int64_t offset = shares.offset(from);
    const at::Tensor& theirs = rendezvous_->of(from).input;
    copy_bytes(write_at(operation.output, offset),
               read_at(theirs, shares_lie_in_inputs ? offset : 0), shares.count(from) * width);
  }
}

void ThreadsCommunicator::reduce_share_on_host(Operation& operation, at::Tensor& output) {
  const int64_t offset = operation.input_shares.offset(rank());
  std::vector<const void*> inputs;
  for (int from = 0; from < size(); ++from)
    inputs.push_back(read_at(rendezvous_->of(from).input, offset));
  reduce_ranks({.inputs = inputs,
                .output = output.mutable_data_ptr(),
                .numel = output.numel(),
                .types = {operation.print.wire, operation.print.result}},
               operation.reduction);
}

void ThreadsCommunicator::all_to_all_on_host(Operation& operation) {
  const int64_t width = operation.output.element_size();
  for (int step = 0; step < size(); ++step) {
    const int from = (rank() + step) % size();
    const Operation& theirs = rendezvous_->of(from);
    copy_bytes(write_at(operation.output, operation.output_shares.offset(from)),
               read_at(theirs.input, theirs.input_shares.offset(rank())),
               operation.output_shares.count(from) * width);
  }
}

void ThreadsCommunicator::broadcast_on_host(Operation& operation) {
  const int root = operation.print.root;
  copy_bytes(write_at(operation.output, 0), read_at(rendezvous_->of(root).input, 0),
             static_cast<int64_t>(operation.output.nbytes()));
}

}  // namespace fsdp
