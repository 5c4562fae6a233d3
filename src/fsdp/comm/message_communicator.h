// Ranks are processes that exchange messages: one communicator for every transport.
#pragma once

#include <memory>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/message_transport.h"

namespace fsdp {

// The communicator "world" of all ranks of the transport's job. Device tensors are staged through
// pinned memory.
std::unique_ptr<Communicator> communicator_over(std::shared_ptr<MessageTransport> transport,
                                                const CommOptions& options);

}  // namespace fsdp
