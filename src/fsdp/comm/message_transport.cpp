#include "fsdp/comm/message_transport.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace fsdp {

using Clock = std::chrono::steady_clock;

void MessageTransport::throw_if_aborted() {
  const auto deadline = Clock::now() + AbortSignal::kMomentForWords;
  Backoff backoff;
  while (abort_.awaits_words() && Clock::now() < deadline) {
    listen();
    backoff.pause();
  }
  abort_.throw_if_raised();
}

int MessageTransport::propose_channel() {
  const std::lock_guard lock(channel_mutex_);
  return next_channel_;
}

void MessageTransport::agree_on_channel(int channel) {
  const std::lock_guard lock(channel_mutex_);
  next_channel_ = std::max(next_channel_, channel + 1);
}

void Backoff::pause() {
  if (++rounds_ < 2000) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(rounds_ < 4000 ? 20 : 200));
}

TimeoutError late_error(const Purpose& purpose, const std::vector<std::string>& missing_ranks) {
  return TimeoutError(
      concat(purpose.what, " waited ", purpose.timeout_seconds, " s for world rank ",
             join(missing_ranks, ", "), missing_ranks.size() == 1 ? ", which has" : ", which have",
             " not arrived; look at what it does instead, or raise ", purpose.timeout_name));
}

CommError size_error(const Purpose& purpose, int peer, int64_t bytes, int64_t expected_bytes) {
  return CommError(concat(purpose.what, ": rank ", peer, " sent ", bytes, " bytes where ",
                          expected_bytes,
                          " were expected: the ranks disagree about what they do; "
                          "run again with FSDP_CHECKED=1 to see both sides"));
}

}  // namespace fsdp
