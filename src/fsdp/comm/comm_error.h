// The errors of communication, and the signal by which one rank's failure reaches all ranks of the
// process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"

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

// One rank's failure, seen by all ranks of the process. The first message stays. A rank that is
// left by an exception closes its communicators before anybody knows the exception's words: it
// raises the signal in passing (`raise_unexplained`), and the others wait a moment for the words.
class AbortSignal {
 public:
  void raise(const std::string& message) {
    {
      const std::lock_guard lock(mutex_);
      if (explained()) return;
      message_ = message;
      explained_.store(true, std::memory_order_release);
      raised_.store(true, std::memory_order_release);
    }
    words_came_.notify_all();
  }
  // `by` is the thread_rank() of the rank whose words will follow: its own threads do not wait for
  // them.
  void raise_unexplained(const std::string& message, int by) {
    const std::lock_guard lock(mutex_);
    if (raised()) return;
    message_ = message;
    unexplained_by_.store(by, std::memory_order_relaxed);
    raised_.store(true, std::memory_order_release);
  }

  bool raised() const { return raised_.load(std::memory_order_acquire); }
  bool explained() const { return explained_.load(std::memory_order_acquire); }

  // Whether the calling thread should give another rank's words a moment to come.
  bool awaits_words() const {
    return raised() && !explained() &&
           unexplained_by_.load(std::memory_order_relaxed) != thread_rank();
  }

  // Throws AbortedError with the message when raised.
  void throw_if_raised() {
    if (!raised()) return;
    std::unique_lock lock(mutex_);
    if (awaits_words()) words_came_.wait_for(lock, kMomentForWords, [this] { return explained(); });
    throw AbortedError(message_);
  }

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
