#include "fsdp/comm/message/message_transport.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

// The first letter of a failure's text.
constexpr char kFinalMark = '!';
constexpr char kInPassingMark = '?';

// Stands for a rank of another process where a thread_rank() of this process is asked for.
constexpr int kAnotherProcess = -2;

}  // namespace

void MessageTransport::throw_if_aborted() {
  const auto deadline = Clock::now() + AbortSignal::kMomentForWords;
  Backoff backoff;
  while (abort_.awaits_words() && Clock::now() < deadline) {
    listen();
    backoff.pause();
  }
  abort_.throw_if_raised();
}

std::string MessageTransport::raise_own(const std::string& message, Words words) {
  const bool is_final = words == Words::kFinal;
  if (abort_.explained() || (abort_.raised() && !is_final)) return "";
  if (is_final) {
    abort_.raise(message);
  } else {
    abort_.raise_unexplained(message, thread_rank());
  }
  return concat(is_final ? kFinalMark : kInPassingMark, message).substr(0, kMaxTextBytes);
}

void MessageTransport::raise_heard(std::string_view text) {
  if (text.empty()) return;
  std::vector<std::string> lines;
  std::istringstream in{std::string(text.substr(1))};
  for (std::string line; std::getline(in, line);) lines.push_back(shown(line, kMaxTextBytes));
  const std::string words = join(lines, "\n");
  if (text.front() == kFinalMark) {
    abort_.raise(words);
  } else {
    abort_.raise_unexplained(words, kAnotherProcess);
  }
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
