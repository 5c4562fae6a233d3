#include "fsdp/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "fsdp/base/text.h"
#include "fsdp/train/log/console.h"

namespace fsdp::cli {

namespace {

// Writes a line; on a terminal in place of the text before, which had `shown_chars`.
void show(std::string text, bool is_terminal, size_t& shown_chars) {
  if (!is_terminal) {
    std::fprintf(stderr, "%s\n", text.c_str());
    return;
  }
  const size_t num_chars = text.size();
  text.resize(std::max(num_chars, shown_chars), ' ');
  shown_chars = num_chars;
  std::fprintf(stderr, "\r%s", text.c_str());
  std::fflush(stderr);
}

}  // namespace

Progress::Progress(std::string what)
    : what_(std::move(what)),
      is_terminal_(::isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_shown_(start_) {}

Progress::~Progress() {
  if (shown_chars_ > 0) std::fprintf(stderr, "\r%s\r", std::string(shown_chars_, ' ').c_str());
}

// On a terminal ten times a second; in a file after every 10 percent, at most a line per second.
// The last one in any case.
bool Progress::is_due(int64_t percent) const {
  if (percent == 100) return percent != last_percent_;
  const auto pause = std::chrono::milliseconds(is_terminal_ ? 100 : 1000);
  const int64_t step = is_terminal_ ? 0 : 10;
  return percent >= last_percent_ + step && Clock::now() - last_shown_ >= pause;
}

void Progress::update(int64_t done_bytes, int64_t total_bytes) {
  const auto done = static_cast<double>(std::min(done_bytes, total_bytes));
  const auto total = static_cast<double>(total_bytes);
  const int64_t percent = total_bytes == 0 ? 100 : static_cast<int64_t>(100.0 * done / total);
  if (!is_due(percent)) return;
  last_percent_ = percent;
  last_shown_ = Clock::now();
  constexpr int64_t kBarChars = 30;
  const auto filled = static_cast<size_t>(kBarChars * percent / 100);
  const std::string bar =
      concat("[", std::string(filled, '#'), std::string(size_t{kBarChars} - filled, '-'), "] ");
  std::string text =
      concat(what_, " ", is_terminal_ ? bar : "", percent, " % of ", bytes_text(total_bytes));
  const std::chrono::duration<double> passed = last_shown_ - start_;
  if (done > 0 && passed.count() > 0.5) {
    const double rate = done / passed.count();
    text += concat(", ", bytes_text(rate), "/s, ",
                   train::duration_text(std::ceil((total - done) / rate)), " left");
  }
  show(std::move(text), is_terminal_, shown_chars_);
}

// --- tokenising ----------------------------------------------------------------------------------

TokenisingLine::TokenisingLine() : is_terminal_(::isatty(STDERR_FILENO) == 1) {}

TokenisingLine::~TokenisingLine() {
  if (shown_chars_ > 0) std::fprintf(stderr, "\n");
}

void TokenisingLine::update(const std::string& what, int64_t done_bytes, int64_t total_bytes) {
  const Clock::time_point now = Clock::now();
  if (what != what_) {
    what_ = what;
    start_ = now;
    next_ = now + std::chrono::milliseconds(700);
  }
  const bool is_done = done_bytes >= total_bytes;
  if (now < next_ && !(is_done && shown_chars_ > 0)) return;
  next_ = now + (is_terminal_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(3000));
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  char figures[96];
  std::snprintf(figures, sizeof figures, "%.1f of %.1f MB, %.1f MB/s", megabytes(done_bytes),
                megabytes(total_bytes), megabytes(done_bytes) / seconds);
  show(concat("tokenising ", what, ": ", figures), is_terminal_, shown_chars_);
}

}  // namespace fsdp::cli
