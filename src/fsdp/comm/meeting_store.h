// Where the processes of a job leave words for each other before they are connected.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "fsdp/comm/launch.h"
#include "fsdp/comm/socket.h"

namespace fsdp {

class MeetingStore {
 public:
  virtual ~MeetingStore() = default;

  // Replaces what was there.
  virtual void publish(const std::string& key, const std::string& text) = 0;

  // nullopt when nobody has published it yet.
  virtual std::optional<std::string> find(const std::string& key) = 0;
};

// The store at MASTER_ADDR:MASTER_PORT, which is libtorch's own (c10d::TCPStore), since torchrun
// may have one open there already (TORCHELASTIC_USE_AGENT_STORE=True). Otherwise rank 0 opens it
// and keeps it until its process ends. An Error when it cannot be opened or reached.
std::shared_ptr<MeetingStore> open_meeting_store(const Launch& launch, Deadline deadline);

// What the keys of this job begin with: a restarted job must not read what it wrote before.
std::string meeting_prefix();

// Whether torchrun's agent holds the store, in which an earlier round may have left words.
bool agent_holds_store();

}  // namespace fsdp
