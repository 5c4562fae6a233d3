// The errors of communication, told apart because their remedies differ.
#pragma once

#include "fsdp/base/error.h"

namespace fsdp {

// A collective could not be carried out: ranks disagree, a transport failed.
class CommError : public Error {
 public:
  using Error::Error;
};

// The other ranks did not come within the deadline.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

// Another rank failed and took everybody down with its message.
class AbortedError : public CommError {
 public:
  using CommError::CommError;
};

}  // namespace fsdp
