#include "fsdp/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "fsdp/base/text.h"

namespace fsdp::cli {

namespace {

constexpr int64_t kBarChars = 30;

std::string left_text(double seconds) {
  const auto whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 120) return concat(whole, " s");
  if (whole < 7200) return concat(whole / 60, " min");
  return concat(whole / 3600, " h ", whole % 3600 / 60, " min");
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

std::string Progress::line(int64_t done_bytes, int64_t total_bytes, int64_t percent) const {
  std::string text = concat(what_, " ");
  if (is_terminal_) {
    const int64_t filled = kBarChars * percent / 100;
    text += concat("[", std::string(static_cast<size_t>(filled), '#'),
                   std::string(static_cast<size_t>(kBarChars - filled), '-'), "] ");
  }
  text += concat(percent, " % of ", bytes_text(static_cast<double>(total_bytes)));
  const std::chrono::duration<double> passed = Clock::now() - start_;
  if (done_bytes > 0 && passed.count() > 0.5) {
    const double rate = static_cast<double>(done_bytes) / passed.count();
    text += concat(", ", bytes_text(rate), "/s, ",
                   left_text(static_cast<double>(total_bytes - done_bytes) / rate), " left");
  }
  return text;
}

void Progress::update(int64_t done_bytes, int64_t total_bytes) {
  const int64_t done = std::min(done_bytes, total_bytes);
  const auto percent = total_bytes == 0 ? 100
                                        : static_cast<int64_t>(100.0 * static_cast<double>(done) /
                                                               static_cast<double>(total_bytes));
  if (!is_due(percent)) return;
  std::string text = line(done, total_bytes, percent);
  last_percent_ = percent;
  last_shown_ = Clock::now();
  if (!is_terminal_) {
    std::fprintf(stderr, "%s\n", text.c_str());
    return;
  }
  const size_t num_chars = text.size();
  text.resize(std::max(num_chars, shown_chars_), ' ');
  shown_chars_ = num_chars;
  std::fprintf(stderr, "\r%s", text.c_str());
  std::fflush(stderr);
}

}  // namespace fsdp::cli
