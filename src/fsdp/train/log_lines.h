// The lines of a run's machine log: records as JSON objects and back. docs/watching.md lists the
// keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "fsdp/train/run_facts.h"
#include "fsdp/train/step_record.h"

namespace fsdp::train {

// Without a line break. `time` is in seconds since 1970. Numbers that are not finite, which JSON
// does not have, become null.
std::string run_line(const RunFacts& facts, double time);
std::string log_line_of(const StepRecord& record, double time);
std::string log_line_of(const ValidationRecord& record, double time);
std::string log_line_of(const CheckpointRecord& record, double time);
std::string log_line_of(const EndRecord& record, double time);

// The beginning of a run, or of its next part.
struct RunStart {
  int64_t resumed_step = 0;
};

using LogRecord = std::variant<RunStart, StepRecord, ValidationRecord, CheckpointRecord, EndRecord>;

// The step a record belongs to.
int64_t step_of(const LogRecord& record);

// What one of these lines says, as far as a report needs it; none for anything else.
std::optional<LogRecord> parse_log_line(std::string_view line);

}  // namespace fsdp::train
