// The machine log of a run: a file of JSON lines, one per record, that outlives crashes, resumes
// and full disks. docs/watching.md lists the keys.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fsdp/train/log/append_file.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- lines ---------------------------------------------------------------------------------------

// RunFacts begin a run, or its next part.
using LogRecord = std::variant<RunFacts, StepRecord, ValidationRecord, CheckpointRecord, EndRecord>;

// The last step that was done when the record was made.
int64_t step_of(const LogRecord& record);

// Receives the records of a log, in their order.
using LogRecordSink = std::function<void(const LogRecord&)>;

// A line without its line break. `time` is in seconds since 1970. Numbers that are not finite
// become null, because JSON does not have them.
std::string log_line(const LogRecord& record, double time);

// Reads one of these lines; nullopt for any other text. Facts are as far as a report needs them:
// settings without their groups, no memory.
std::optional<LogRecord> parse_log_line(std::string_view line);

// The number that has so many decimal digits and is nearest, which JSON then shows in them.
double in_digits(double value, int digits);

// --- the file ------------------------------------------------------------------------------------

// The records of a log that may be damaged or grow meanwhile, without lines that are no records and
// without steps that a later part of the run did again.
std::vector<LogRecord> read_log(const std::string& path);

// For one thread at a time.
class JsonLog {
 public:
  // A new run (resumed_step 0) begins a new file and renames an old one to "PATH.previous". A
  // resumed run goes on in its file: half lines and steps after `resumed_step`, left by an
  // interrupted run, are removed, and the other records go to `restored`.
  JsonLog(const std::string& path, int64_t resumed_step, const LogRecordSink& restored = {});

  // `line` is without its line break.
  void write(std::string line);

 private:
  AppendFile file_;
};

}  // namespace fsdp::train
