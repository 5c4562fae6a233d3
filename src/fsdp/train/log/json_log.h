// The machine log of a run: a file of JSON lines, one per record, that outlives crashes, resumes
// and full disks. docs/watching.md lists the keys.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "fsdp/train/log/append_file.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- lines ---------------------------------------------------------------------------------------

// Lines without a line break. `time` is in seconds since 1970. Numbers that are not finite become
// null, because JSON does not have them.
std::string run_line(const RunFacts& facts, double time);
std::string log_line_of(const StepRecord& record, double time);
std::string log_line_of(const ValidationRecord& record, double time);
std::string log_line_of(const CheckpointRecord& record, double time);
std::string log_line_of(const EndRecord& record, double time);

// The beginning of a run, or of its next part.
struct RunStart {
  int64_t resumed_step = 0;
  // As the log has them: settings without their groups, no memory.
  RunFacts facts = {};
};

using LogRecord = std::variant<RunStart, StepRecord, ValidationRecord, CheckpointRecord, EndRecord>;

int64_t step_of(const LogRecord& record);

// Reads one of these lines, as far as a report needs it; nullopt for any other text.
std::optional<LogRecord> parse_log_line(std::string_view line);

// --- the file ------------------------------------------------------------------------------------

// Receives the records of a resumed log, in their order.
using LogRecordSink = std::function<void(const LogRecord&)>;

// Reads a log that may be damaged, or grow meanwhile: passes over lines that are no records, and
// over steps that a later part of the run did again.
void read_log(const std::string& path, const LogRecordSink& use);

// For one thread at a time.
class JsonLog {
 public:
  // A new run (resumed_step 0) begins a new file and renames an old one to "PATH.previous". A
  // resumed run goes on in its file: half lines and steps after `resumed_step`, left by an
  // interrupted run, are removed, and the other records go to `restored`.
  JsonLog(const std::string& path, int64_t resumed_step, const LogRecordSink& restored = {});

  // `line` is without its line break.
  void write(std::string line);

  const std::string& path() const { return file_.path(); }

 private:
  AppendFile file_;
};

}  // namespace fsdp::train
