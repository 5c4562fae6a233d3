// The machine log of a run: a file of JSON lines that outlives crashes, resumes and full disks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "fsdp/train/append_file.h"
#include "fsdp/train/log_lines.h"

namespace fsdp::train {

// Receives what a resumed log holds, in its order.
using LogRecordSink = std::function<void(const LogRecord&)>;

// For one thread at a time.
class JsonLog {
 public:
  // A new run (resumed_step 0) begins a new file; one that is there is renamed to "PATH.previous".
  // A resumed run goes on in its file, without what an interrupted one had written there of later
  // steps or of half a line; what remains goes to `restored`.
  JsonLog(const std::string& path, int64_t resumed_step, const LogRecordSink& restored = {});

  // `line` is without its line break.
  void write(std::string line);

  const std::string& path() const { return file_.path(); }

 private:
  AppendFile file_;
};

}  // namespace fsdp::train
