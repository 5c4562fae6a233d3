#include "fsdp/base/log.h"

#include <cstdio>
#include <string>
#include <vector>

#include "fsdp/base/env.h"

namespace fsdp {

namespace {

thread_local int log_rank = -1;

LogLevel level_from_environment() {
  static const std::vector<std::string> kNames = {"debug", "info", "warning", "error"};
  return static_cast<LogLevel>(env_choice("FSDP_LOG", kNames, 1));
}

}  // namespace

bool log_enabled(LogLevel level) {
  static const LogLevel threshold = level_from_environment();
  return level >= threshold;
}

void log_line(LogLevel level, std::string_view message) {
  std::string line = log_rank < 0 ? "" : concat("[rank ", log_rank, "] ");
  if (level == LogLevel::kWarning) line += "warning: ";
  if (level == LogLevel::kError) line += "error: ";
  line += message;
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void set_log_rank(int rank) { log_rank = rank; }

}  // namespace fsdp
