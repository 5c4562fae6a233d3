// The errors that fsdp.cpp throws when something cannot go on.
#pragma once

#include <stdexcept>

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

}  // namespace fsdp
