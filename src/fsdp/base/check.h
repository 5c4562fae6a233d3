// The two macros that throw when a condition does not hold.
#pragma once

#include <string>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {

[[noreturn, gnu::cold]] inline void throw_internal_error(const char* file, int line,
                                                         const char* condition,
                                                         const std::string& message) {
  throw InternalError(concat("internal error at ", file, ":", line, ": ", condition,
                             message.empty() ? "" : ": ", message));
}

}  // namespace fsdp

// The message parts are formatted only when the condition fails.
#define FSDP_CHECK(condition, ...)                      \
  do {                                                  \
    if (!(condition)) [[unlikely]]                      \
      throw ::fsdp::Error(::fsdp::concat(__VA_ARGS__)); \
  } while (false)

#define FSDP_ASSERT(condition, ...)                                                \
  do {                                                                             \
    if (!(condition)) [[unlikely]]                                                 \
      ::fsdp::throw_internal_error(__FILE__, __LINE__, #condition,                 \
                                   ::fsdp::concat("" __VA_OPT__(, ) __VA_ARGS__)); \
  } while (false)
