// The errors of communication, and the signal by which one rank's failure reaches all ranks of the
// process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

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

// Another rank failed; the message has its words. A consequence: whoever has the errors of several
// ranks reports one that is no RemoteError instead.
class RemoteError : public CommError {
 public:
  using CommError::CommError;
};

// Another rank failed and took everybody down with its message.
class AbortedError : public RemoteError {
 public:
  using RemoteError::RemoteError;
};

// One rank's failure, seen by all ranks of the process. Raised once; the first message stays.
// Waiting code looks at it between short sleeps.
//
// A rank that is left by an exception closes its communicators before anybody has caught the
// exception and knows its words. It raises the signal in passing (`raise_unexplained`), so that
// nobody waits for it any more; the words follow when the exception is caught, and every other rank
// that is told of the failure waits a moment for them.
class AbortSignal {
 public:
  void raise(const std::string& message);
  // `by` is the thread_rank() of the rank whose words will follow: its own threads do not wait for
  // them.
  void raise_unexplained(const std::string& message, int by);

  bool raised() const { return raised_.load(std::memory_order_acquire); }
  bool explained() const { return explained_.load(std::memory_order_acquire); }

  // Whether the calling thread should give another rank's words a moment to come.
  bool awaits_words() const;

  // Throws AbortedError with the message when raised.
  void throw_if_raised();

  static constexpr std::chrono::milliseconds kMomentForWords{1000};

 private:
  std::atomic<bool> raised_{false};
  std::atomic<bool> explained_{false};
  std::atomic<int> unexplained_by_{-1};
  std::mutex mutex_;  // orders writers; protects message_
  std::condition_variable words_came_;
  std::string message_;
};

}  // namespace fsdp
