// A run as its log tells it, for reports after or beside it.
#pragma once

#include <string>

#include "fsdp/train/log/run_history.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

struct LoggedRun {
  std::string name = {};  // its directory or log, as given
  RunFacts facts = {};    // of its newest part; no memory
  RunHistory history = {};
};

// From a log, or from the directory of a run, whose log is log.jsonl. Throws an Error for a place
// without a log or a log without a step.
LoggedRun read_logged_run(const std::string& path);

}  // namespace fsdp::train
