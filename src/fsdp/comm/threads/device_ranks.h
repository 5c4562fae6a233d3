// Collectives among ranks that are threads of one process and whose tensors are on a device, and
// copies between them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/operation.h"
#include "fsdp/comm/threads/rendezvous.h"

namespace fsdp {

// What a communicator keeps on its device; all of it is made at its first use.
struct DeviceSide {
  std::optional<c10::Stream> stream;  // all copies and sums of this communicator
  at::Tensor workspace;               // of the sums
  bool has_copied = false;            // since the ranks met last
};

// Makes `ready` of a device operation mean: the caller's stream, or a copy before this operation,
// has produced the input, and what the operation comes after has ended.
void follow_on_device(Operation& operation, DeviceSide& side);

// Runs an OpKind::kCopy, which needs no other rank, on the host or on this communicator's stream.
std::optional<c10::Event> run_copy(Operation& operation, DeviceSide& side);

// Enqueues this rank's part of `operation`, which has been met, on its stream and returns the event
// after which the result is there and nobody reads this rank's tensors any more. The host waits for
// the other ranks' threads, never for a device.
c10::Event run_on_device(Rendezvous& rendezvous, int rank, Operation& operation, DeviceSide& side);

}  // namespace fsdp
