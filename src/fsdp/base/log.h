// Messages for people, on standard error: one line each, with the rank when there are several.
#pragma once

#include <string>
#include <string_view>

#include "fsdp/base/text.h"

namespace fsdp {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// The level is read once from FSDP_LOG (debug, info, warning, error); default info.
bool log_enabled(LogLevel level);

// An Error when FSDP_LOG is none of these, which would otherwise be found with the first message.
void check_log_level();

// Writes one line in one piece, so that lines of several ranks do not mix.
void log_line(LogLevel level, std::string_view message);

template <typename... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (log_enabled(level)) log_line(level, concat(parts...));
}

// The rank the calling thread works for, named in its messages ("[rank 3] ..."); -1 for none. Ranks
// may be threads of one process, so this belongs to the thread.
void set_thread_rank(int rank);
int thread_rank();

}  // namespace fsdp
