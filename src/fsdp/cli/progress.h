// The progress of a long command, on standard error: a bar on a terminal, else a line now and then.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fsdp::cli {

// One per command. The destructor removes the bar, but keeps the last line.
class Progress {
 public:
  // `what` begins every line: "verify".
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done_bytes` never falls.
  void update(int64_t done_bytes, int64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;

  bool is_due(int64_t percent) const;

  const std::string what_;
  const bool is_terminal_;
  const Clock::time_point start_;
  Clock::time_point last_shown_;
  int64_t last_percent_ = 0;
  size_t shown_chars_ = 0;  // of the bar, to be wiped
};

// "tokenising chats.jsonl: 4.1 of 20.0 MB, 5.2 MB/s": from the first second on, on a terminal in
// one line, else every few seconds. A quick one says nothing.
class TokenisingLine {
 public:
  TokenisingLine();
  ~TokenisingLine();
  TokenisingLine(const TokenisingLine&) = delete;
  TokenisingLine& operator=(const TokenisingLine&) = delete;

  void update(const std::string& what, int64_t done_bytes, int64_t total_bytes);

 private:
  using Clock = std::chrono::steady_clock;

  const bool is_terminal_;
  std::string what_;
  Clock::time_point start_;
  Clock::time_point next_;
  size_t shown_chars_ = 0;
};

}  // namespace fsdp::cli
