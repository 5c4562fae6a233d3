// The machine log of a run: a file of JSON lines that outlives crashes, resumes and full disks.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "fsdp/base/durable_file.h"
#include "fsdp/train/log_lines.h"

namespace fsdp::train {

// Receives what a resumed log holds, in its order.
using LogRecordSink = std::function<void(const LogRecord&)>;

// Appends lines, each in one piece and at once, so that `tail -f` shows it. For one thread at a
// time.
class JsonLog {
 public:
  // A new run (resumed_step 0) begins a new file; one that is there is renamed to "PATH.previous".
  // A resumed run goes on in its file, without what an interrupted one had written there of later
  // steps or of half a line; what remains goes to `restored`.
  // An Error if the file cannot be made: better now than after a night.
  JsonLog(std::string path, int64_t resumed_step, const LogRecordSink& restored = {});

  // What cannot be written (the disk is full) is lost: training is worth more than its log. Said
  // once, and again after it has worked in between.
  void write(std::string line);

  const std::string& path() const { return path_; }

 private:
  void open();

  std::string path_;
  FileHandle file_;
  int64_t bytes_ = 0;  // whole lines; kNotAFile for pipes and terminals
  bool is_failing_ = false;
};

}  // namespace fsdp::train
