#include "fsdp/train/log/console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ostream>
#include <utility>

#include "fsdp/base/env.h"
#include "fsdp/base/text.h"
#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/utf8_text.h"

namespace fsdp::train {

namespace {

constexpr int64_t kDefaultWidth = 100;
constexpr int64_t kMaxLinesInAFile = 100;  // one per hundredth of the run
constexpr int64_t kLinesPerHeader = 40;    // on a terminal: about a screen
constexpr double kSecondsPerRedraw = 0.1;

// Colours that are readable on light and dark.
constexpr std::string_view kDim = "\x1b[2m";
constexpr std::string_view kYellow = "\x1b[33m";
constexpr std::string_view kGreen = "\x1b[32m";
constexpr std::string_view kReset = "\x1b[0m";
constexpr std::string_view kWipeLine = "\r\x1b[K";

// The lowest of 1, 2, 5, 10, 20, ... with which at most max_lines lines are printed.
int64_t chosen_log_every(int64_t total_steps, int64_t max_lines) {
  int64_t every = 1;
  for (int64_t i = 0; total_steps / every > max_lines; ++i)
    every = i % 3 == 1 ? every / 2 * 5 : every * 2;
  return every;
}

std::string loss_text(double loss) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4f", loss);
  return text.data();
}

// Indents a model's text, so that it cannot be taken for lines of the run.
std::string indented(std::string_view text) {
  std::string result = "    ";
  for (const char c : clean_utf8(text)) {
    result += c;
    if (c == '\n') result += "    ";
  }
  return result;
}

}  // namespace

ConsoleOptions console_options_for_stdout() {
  ConsoleOptions options;
  const std::string term = env_text("TERM").value_or("dumb");
  options.has_bar = ::isatty(STDOUT_FILENO) == 1 && term != "dumb";
  if (!options.has_bar) options.max_lines = kMaxLinesInAFile;
  options.has_colors = options.has_bar && !env_text("NO_COLOR");
  options.width = []() -> int64_t {
    winsize size{};
    const bool is_known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return is_known ? size.ws_col : kDefaultWidth;
  };
  return options;
}

Console::Console(ConsoleOptions options, std::ostream& out)
    : options_(std::move(options)), out_(out) {
  if (!options_.width) options_.width = [] { return kDefaultWidth; };
  if (!options_.now)
    options_.now = [] {
      using Seconds = std::chrono::duration<double>;
      return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
}

Console::~Console() {
  wipe_bar();
  out_.flush();
}

void Console::begin(const RunFacts& facts) {
  if (options_.is_quiet) return;
  out_ << start_text(facts, options_.width());
  out_.flush();
}

void Console::step(const StepRecord& record) {
  if (options_.is_quiet) return;
  if (first_step_ == 0) {
    first_step_ = record.step;
    first_step_at_ = options_.now();
    columns_ = StepColumns::of(record, options_.width());
  }
  last_step_ = record.step;
  total_steps_ = record.total_steps;
  const std::string remark = step_remark(record);
  const bool is_special = !remark.empty();
  if (is_due(record) || (is_special && !was_special_)) {
    const bool scrolled_away = options_.has_bar && num_lines_since_header_ >= kLinesPerHeader;
    if (num_lines_since_header_ < 0 || scrolled_away) {
      print_line(columns_.header(), kDim);
      num_lines_since_header_ = 0;
    }
    const std::string line = columns_.line(record);
    print_line(is_special ? concat(line, "  ", remark) : line, is_special ? kYellow : "");
    ++num_lines_since_header_;
  }
  was_special_ = is_special;
  if (options_.now() - bar_drawn_at_ < kSecondsPerRedraw) return;
  draw_bar();
  out_.flush();
}

void Console::validation(const ValidationRecord& record, double best) {
  const bool is_best = record.loss < best;
  print_line(concat("validation after step ", record.step, ": loss ", loss_text(record.loss),
                    !is_best              ? concat("  (best ", loss_text(best), ")")
                    : std::isfinite(best) ? concat("  (was ", loss_text(best), ")")
                                          : std::string()),
             is_best ? kGreen : "");
}

void Console::checkpoint(const CheckpointRecord& record) {
  print_line(concat("checkpoint of step ", record.step, ": ", record.path, ", ",
                    bytes_text(static_cast<double>(record.bytes)), " in ",
                    duration_text(record.milliseconds / 1000), " (training waited ",
                    duration_text(record.blocked_milliseconds / 1000), ")"));
}

void Console::sample(const TextSample& sample) {
  print_line(concat("sample after step ", sample.step, ":\n",
                    indented(sample.prompt + sample.continuation)));
}

void Console::end(const EndRecord& record, const std::optional<ValidationRecord>& best,
                  const std::string& report_path) {
  std::string text = concat("trained ", counted_text(record.num_steps, "step"), " in ",
                            duration_text(record.seconds));
  if (!record.stopped_by.empty())
    text += concat(", stopped by ", record.stopped_by, " after step ", record.step);
  if (best)
    text += concat("; best validation loss ", loss_text(best->loss), " at step ", best->step);
  if (!report_path.empty()) text += concat("; report ", report_path);
  total_steps_ = 0;  // no bar any more
  print_line(text);
}

void Console::note(std::string_view text) { print_line(text); }

bool Console::is_due(const StepRecord& record) const {
  const int64_t every = options_.log_every > 0
                            ? options_.log_every
                            : chosen_log_every(record.total_steps, options_.max_lines);
  return record.step % every == 0 || record.step == first_step_ ||
         record.step == record.total_steps;
}

void Console::print_line(std::string_view line, std::string_view color) {
  if (options_.is_quiet) return;
  wipe_bar();
  if (options_.has_colors && !color.empty())
    out_ << color << line << kReset << '\n';
  else
    out_ << line << '\n';
  draw_bar();
  out_.flush();
}

// Leaves the cursor at the beginning of the bar, so that other output replaces it.
void Console::draw_bar() {
  if (!options_.has_bar || total_steps_ == 0) return;
  const double now = options_.now();
  bar_drawn_at_ = now;
  // The first step also pays for one-time work, so it is not counted.
  const int64_t num_timed = last_step_ - first_step_;
  const double left = num_timed == 0 ? -1
                                     : (now - first_step_at_) / static_cast<double>(num_timed) *
                                           static_cast<double>(total_steps_ - last_step_);
  out_ << kWipeLine << progress_bar(last_step_, total_steps_, left, options_.width() - 1) << '\r';
  is_bar_shown_ = true;
}

void Console::wipe_bar() {
  if (std::exchange(is_bar_shown_, false)) out_ << kWipeLine;
}

}  // namespace fsdp::train
