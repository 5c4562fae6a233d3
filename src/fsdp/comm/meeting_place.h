// Where torchrun's processes, or those of whoever sets its variables, find rank 0.
#pragma once

#include <memory>
#include <string>

#include "fsdp/comm/launch.h"
#include "fsdp/comm/tcp_mesh.h"

namespace fsdp {

// Whether torchrun's agent has a store open at MASTER_ADDR:MASTER_PORT (libtorch's c10d::TCPStore),
// in which an earlier round of the job may have left words.
bool agent_holds_store();

// The meeting place of the meeting with that name. The agent's store, in which rank 0 leaves its
// address; otherwise rank 0 itself listens at MASTER_ADDR:MASTER_PORT. An Error when the store
// cannot be reached.
std::unique_ptr<MeetingPlace> open_meeting_place(const Launch& launch, const std::string& meeting,
                                                 Deadline deadline);

}  // namespace fsdp
