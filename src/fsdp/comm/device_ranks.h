// Collectives among ranks that are threads of one process and whose tensors are on a device.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

#include "fsdp/comm/operation.h"
#include "fsdp/comm/rendezvous.h"

namespace fsdp {

// Makes `ready` of a device operation mean: the caller's stream has produced the input, and what
// the operation comes after has ended. `stream` is created on first use.
void follow_on_device(Operation& operation, std::optional<c10::Stream>& stream);

// Enqueues this rank's part of `operation`, which has been met, on `stream` (created on first use)
// and returns the event after which the result is there and nobody reads this rank's input any
// more. The host waits for the other ranks' threads, never for a device.
c10::Event run_on_device(Rendezvous& rendezvous, int rank, Operation& operation,
                         std::optional<c10::Stream>& stream);

}  // namespace fsdp
