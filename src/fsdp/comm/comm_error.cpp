#include "fsdp/comm/comm_error.h"

#include "fsdp/base/log.h"

namespace fsdp {

void AbortSignal::raise(const std::string& message) {
  {
    const std::lock_guard lock(mutex_);
    if (explained()) return;
    message_ = message;
    explained_.store(true, std::memory_order_release);
    raised_.store(true, std::memory_order_release);
  }
  words_came_.notify_all();
}

void AbortSignal::raise_unexplained(const std::string& message, int by) {
  const std::lock_guard lock(mutex_);
  if (raised()) return;
  message_ = message;
  unexplained_by_.store(by, std::memory_order_relaxed);
  raised_.store(true, std::memory_order_release);
}

bool AbortSignal::awaits_words() const {
  return raised() && !explained() &&
         unexplained_by_.load(std::memory_order_relaxed) != thread_rank();
}

void AbortSignal::throw_if_raised() {
  if (!raised()) return;
  std::unique_lock lock(mutex_);
  if (awaits_words()) words_came_.wait_for(lock, kMomentForWords, [this] { return explained(); });
  throw AbortedError(message_);
}

}  // namespace fsdp
