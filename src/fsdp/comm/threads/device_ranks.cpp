#include "fsdp/comm/threads/device_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

#include "fsdp/comm/reduce/reduce_on_device.h"

namespace fsdp {

namespace {

at::Tensor share_of(const at::Tensor& tensor, const Shares& shares, int rank) {
  return tensor.view(-1).narrow(0, shares.offset(rank), shares.count(rank));
}

void copy_flat(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() > 0 && to.const_data_ptr() != from.const_data_ptr())
    to.view(-1).copy_(from.view(-1), /*non_blocking=*/true);
}

c10::Stream stream_of(DeviceSide& side, c10::Device device) {
  if (!side.stream) side.stream = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  return *side.stream;
}

void reduce_share_on_device(Rendezvous& rendezvous, int rank, const Operation& operation,
                            const at::Tensor& output, DeviceSide& side) {
  std::vector<at::Tensor> inputs;
  for (int from = 0; from < rendezvous.ranks(); ++from)
    inputs.push_back(share_of(rendezvous.of(from).input, operation.input_shares, rank));
  reduce_on_device(inputs, operation.reduction, output, side.workspace);
}

void copy_in(Rendezvous& rendezvous, int rank, Operation& operation, DeviceSide& side) {
  const int ranks = rendezvous.ranks();
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      for (int step = 0; step < ranks; ++step) {
        const int from = (rank + step) % ranks;
        copy_flat(share_of(operation.output, operation.output_shares, from),
                  rendezvous.of(from).input);
      }
      return;
    case OpKind::kReduceScatter:
      return reduce_share_on_device(rendezvous, rank, operation, operation.output, side);
    case OpKind::kAllReduce:
      return reduce_share_on_device(rendezvous, rank, operation,
                                    share_of(operation.output, operation.output_shares, rank),
                                    side);
    case OpKind::kAllToAll:
      for (int step = 0; step < ranks; ++step) {
        const int from = (rank + step) % ranks;
        const Operation& theirs = rendezvous.of(from);
        copy_flat(share_of(operation.output, operation.output_shares, from),
                  share_of(theirs.input, theirs.input_shares, rank));
      }
      return;
    case OpKind::kBroadcast:
      return copy_flat(operation.output, rendezvous.of(operation.print.root).input);
    case OpKind::kBarrier:
    case OpKind::kCopy:
      return;
  }
}

}  // namespace

void follow_on_device(Operation& operation, DeviceSide& side) {
  const c10::Event* ended = operation.after.event();
  // Other ranks read what a copy wrote on this rank's stream, and wait for `ready` alone.
  const bool follows_copy = std::exchange(side.has_copied, false);
  if (ended == nullptr && !follows_copy) return;
  stream_of(side, operation.device());
  operation.on_device->ready.block(*side.stream);
  if (ended != nullptr) ended->block(*side.stream);
  operation.on_device->ready.record(
      *side.stream);  // nobody has seen it yet: the ranks have not met
}

std::optional<c10::Event> run_copy(Operation& operation, DeviceSide& side) {
  const c10::Device device = operation.device();
  if (device.is_cpu()) {
    operation.output.view(-1).copy_(operation.input.view(-1));
    return std::nullopt;
  }
  const c10::Stream stream = stream_of(side, device);
  operation.on_device->runs_on = stream;
  const c10::StreamGuard guard(stream);
  follow_on_device(operation, side);
  operation.on_device->ready.block(stream);
  copy_flat(operation.output, operation.input);
  side.has_copied = true;
  c10::Event finished(device.type());
  finished.record(stream);
  return finished;
}

// Each rank's stream waits until every input is produced, reads, and records that it has read; then
// waits until everybody has read its own input. The events are shared through the operations, which
// stay in place until the last sync.
c10::Event run_on_device(Rendezvous& rendezvous, int rank, Operation& operation, DeviceSide& side) {
  const c10::Device device = operation.device();
  const c10::Stream stream = stream_of(side, device);
  operation.on_device->runs_on = stream;
  const c10::StreamGuard guard(stream);
  const auto wait_for_everybody = [&] {
    for (int other = 0; other < rendezvous.ranks(); ++other)
      rendezvous.of(other).on_device->ready.block(stream);
  };
  // `ready` is re-recorded for each phase: first "input produced" (by the caller's stream), then "I
  // have read". A sync between the last use of one meaning and the first of the next.
  const auto everybody_reaches_here = [&] {
    rendezvous.sync(rank);
    operation.on_device->ready.record(stream);
    rendezvous.sync(rank);
    wait_for_everybody();
  };

  wait_for_everybody();
  copy_in(rendezvous, rank, operation, side);
  everybody_reaches_here();
  if (operation.print.kind == OpKind::kAllReduce) {
    for (int step = 1; step < rendezvous.ranks(); ++step) {
      const int from = (rank + step) % rendezvous.ranks();
      copy_flat(share_of(operation.output, operation.output_shares, from),
                share_of(rendezvous.of(from).output, operation.output_shares, from));
    }
    everybody_reaches_here();
  }
  c10::Event finished(device.type());
  finished.record(stream);
  rendezvous.sync(rank);
  return finished;
}

}  // namespace fsdp
