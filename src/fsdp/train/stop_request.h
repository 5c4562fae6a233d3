// Whether somebody asked this process to stop: the first SIGINT or SIGTERM asks, the second ends
// it.
#pragma once

namespace fsdp::train {

// While one of these lives the signals are ours. One per process.
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
