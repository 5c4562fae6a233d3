#include "fsdp/base/log.h"

#include <cstdio>
#include <string>
#include <vector>

#include "fsdp/base/env.h"

namespace fsdp {

namespace {

thread_local int rank_of_thread = -1;

LogLevel level_from_environment() {
  static const std::vector<std::string> kNames = {"debug", "info", "warning", "error"};
  return static_cast<LogLevel>(env_choice("FSDP_LOG", kNames, 1));
}

}  // namespace

bool log_enabled(LogLevel level) {
  static const LogLevel threshold = level_from_environment();
  return level >= threshold;
}

void check_log_level() { static_cast<void>(level_from_environment()); }

void log_line(LogLevel level, std::string_view message) {
  std::string line = rank_of_thread < 0 ? "" : concat("[rank ", rank_of_thread, "] ");
  if (level == LogLevel::kWarning) line += "warning: ";
  if (level == LogLevel::kError) line += "error: ";
  line += message;
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void set_thread_rank(int rank) { rank_of_thread = rank; }

int thread_rank() { return rank_of_thread; }

}  // namespace fsdp
