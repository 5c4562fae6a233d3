// Tells whether somebody asked this process to stop: the first SIGINT or SIGTERM asks, the second
// one ends the process.
#pragma once

namespace fsdp::train {

// Handles the two signals while it lives. One per process.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  // The signal that asked; 0 for none.
  int signal() const;
};

// "SIGTERM"
const char* signal_name(int signal);

}  // namespace fsdp::train
