// One run at a time writes to a run's directory.
#pragma once

#include <string>

#include "fsdp/base/durable_file.h"

namespace fsdp {

// Holds RUN/lock, which has the host and the number of the process in it, for its lifetime. The
// kernel lets go of it however the process ends, so a file that a crash leaves is no obstacle.
// Whoever only reads needs none.
class RunLock {
 public:
  // The directory must be there. Error that names the run that has it. Where the file system has no
  // locks, a warning, and nothing is held; docs/checkpoints.md tells which have them per host only.
  explicit RunLock(const std::string& directory);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  std::string path_;
  FileHandle file_;
};

}  // namespace fsdp
