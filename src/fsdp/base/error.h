// What is thrown when something cannot go on, and the two macros that throw it.
#pragma once

#include <stdexcept>
#include <string>

#include "fsdp/base/text.h"

namespace fsdp {

// Something a user, a file or the environment caused. The message is one sentence that names the
// field, its value and the fix.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An Error in how the program was called (options, configuration): the command exits with 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A defect of fsdp.cpp itself; nothing a user can do about it but report it.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

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
