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
#include <vector>

#include "fsdp/base/env.h"
#include "fsdp/base/text.h"
#include "fsdp/train/log/run_history.h"

namespace fsdp::train {

namespace {

// --- texts ---------------------------------------------------------------------------------------

constexpr std::string_view kGap = "  ";

std::string printed(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

// Uses fixed digits, which line up, and an exponent where they would show nothing or too much.
std::string column_number(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::abs(value);
  if (value != 0 && (size < 0.01 || size >= 10000)) return printed("%.2e", value);
  return printed(digits == 4 ? "%.4f" : "%.3f", value);
}

std::string right_aligned(std::string_view text, size_t width) {
  std::string result(width > text.size() ? width - text.size() : 0, ' ');
  return result.append(text);
}

size_t step_cell_chars(int64_t step_chars) {
  return std::max<size_t>(4, static_cast<size_t>(2 * step_chars + 1));
}

std::string padded(const std::string& text, size_t width) {
  return text.size() >= width ? text : text + std::string(width - text.size(), ' ');
}

// A longer value (a list of files, say) ends with "..." in a line; the log has all of it.
constexpr size_t kMaxLineValue = 60;

std::string shortened(const std::string& value) {
  return value.size() <= kMaxLineValue ? value : value.substr(0, kMaxLineValue - 3) + "...";
}

// "lead: a, b, c", with a line break before an item that does not fit.
std::string wrapped(const std::string& lead, std::span<const std::string> items, int64_t width) {
  std::string text = lead;
  size_t line_begin = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const bool fits = text.size() - line_begin + items[i].size() + 2 <= static_cast<size_t>(width);
    if (!fits) line_begin = text.size() + 1;
    text += concat(fits ? " " : "\n  ", items[i], i + 1 < items.size() ? "," : "\n");
  }
  return text;
}

// "" where nothing is forecast.
std::string forecast_lines(std::span<const MemoryRow> memory, int64_t width) {
  std::array<int64_t, 2> totals{};
  std::vector<std::string> parts;
  for (const MemoryRow& row : memory) {
    if (row.forecast_bytes == kUnknownBytes || row.forecast_bytes == 0) continue;
    totals[row.is_on_host] += row.forecast_bytes;
    parts.push_back(concat(row.kind, " ", bytes_text(row.forecast_bytes)));
  }
  if (parts.empty()) return "";
  const std::string on_host =
      totals[1] == 0 ? "" : concat(" and ", bytes_text(totals[1]), " on the host");
  return wrapped(concat("memory per rank (forecast): ", bytes_text(totals[0]), on_host, " ="),
                 parts, width);
}

// --- the console ---------------------------------------------------------------------------------

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

}  // namespace

struct StepColumn {
  const char* name;
  size_t width;
  std::string (*text)(const StepRecord& record);
};

namespace {

std::string speed_text(const StepRecord& record) {
  const double tokens = std::clamp(record.tokens_per_second, 0.0, 1e15);
  return grouped_text(std::llround(std::isnan(tokens) ? 0 : tokens));
}

constexpr std::array<StepColumn, 5> kColumns = {{
    {"loss", 9, [](const StepRecord& step) { return column_number(step.loss, 4); }},
    {"grad norm", 9, [](const StepRecord& step) { return column_number(step.gradient_norm, 3); }},
    {"lr", 9, [](const StepRecord& step) { return printed("%.2e", step.learning_rate); }},
    {"ms", 8, [](const StepRecord& step) { return printed("%.1f", step.milliseconds); }},
    {"tokens/s", 10, speed_text},
}};
// Columns of what may not be known.
constexpr StepColumn kTeraflops = {"TFLOP/s", 7, [](const StepRecord& step) {
                                     return printed(step.teraflops < 10 ? "%.2f" : "%.1f",
                                                    step.teraflops);
                                   }};
constexpr StepColumn kMfu = {
    "MFU", 6, [](const StepRecord& step) { return printed("%.1f %%", 100 * step.mfu); }};
constexpr StepColumn kPeak = {"peak", 9,
                              [](const StepRecord& step) { return bytes_text(step.peak_bytes); }};

}  // namespace

StepColumns StepColumns::of(const StepRecord& first, int64_t width) {
  StepColumns columns{.step_chars = static_cast<int64_t>(std::to_string(first.total_steps).size())};
  for (const StepColumn& each : kColumns) columns.shown.push_back(&each);
  if (first.teraflops > 0) columns.shown.push_back(&kTeraflops);
  if (first.mfu > 0) columns.shown.push_back(&kMfu);
  if (first.peak_bytes > 0) columns.shown.push_back(&kPeak);
  for (const StepColumn* each : {&kTeraflops, &kPeak, &kMfu})
    if (columns.width() > width) std::erase(columns.shown, each);
  return columns;
}

std::string StepColumns::header() const {
  std::string text = right_aligned("step", step_cell_chars(step_chars));
  for (const StepColumn* each : shown)
    text.append(kGap).append(right_aligned(each->name, each->width));
  return text;
}

std::string StepColumns::line(const StepRecord& record) const {
  std::string text =
      right_aligned(concat(record.step, "/", record.total_steps), step_cell_chars(step_chars));
  for (const StepColumn* each : shown)
    text.append(kGap).append(right_aligned(each->text(record), each->width));
  return text;
}

std::string step_remark(const StepRecord& record) {
  if (!record.learns) return "skipped: no token to learn";
  if (record.is_skipped) return "skipped: gradients are not finite";
  if (!std::isfinite(record.loss)) return "the loss is not finite";
  if (std::abs(record.loss_z) < kOutlierZ) return "";
  return concat("loss z ", printed("%+.1f", record.loss_z));
}

std::string duration_text(double seconds) {
  if (!(seconds < 1e9)) return "years";
  if (seconds == std::floor(seconds) && seconds < 10)
    return printed("%.0f s", std::max(seconds, 0.0));
  if (seconds < 0.9995) return printed("%.0f ms", 1000 * std::max(seconds, 0.0));
  if (seconds < 9.95) return printed("%.1f s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 60) return concat(whole, " s");
  if (whole < 3600) return concat(whole / 60, " min ", whole % 60, " s");
  if (whole < 172800) return concat(whole / 3600, " h ", whole % 3600 / 60, " min");
  return concat(whole / 86400, " d ", whole % 86400 / 3600, " h");
}

std::string progress_bar(int64_t done, int64_t total, double seconds_left, int64_t width) {
  constexpr int64_t kMaxBar = 40;
  constexpr int64_t kMinBar = 10;
  const int64_t shown = std::clamp<int64_t>(done, 0, std::max<int64_t>(total, 0));
  const int64_t percent =
      total <= 0
          ? 0
          : static_cast<int64_t>(100 * static_cast<double>(shown) / static_cast<double>(total));
  const std::string before = right_aligned(concat(percent, " %"), 5);
  std::string after = concat(kGap, shown, "/", total);
  if (seconds_left >= 0) after += concat(kGap, duration_text(std::ceil(seconds_left)), " left");
  const int64_t room = width - static_cast<int64_t>(before.size() + after.size()) - 3;
  std::string text = before;
  if (room >= kMinBar) {
    const int64_t bar = std::min(room, kMaxBar);
    const int64_t filled = bar * percent / 100;
    text += concat(" [", std::string(static_cast<size_t>(filled), '#'),
                   std::string(static_cast<size_t>(bar - filled), '-'), "]");
  }
  text += after;
  return text.substr(0, static_cast<size_t>(std::max<int64_t>(width, 0)));
}

std::string start_text(const RunFacts& facts, int64_t width) {
  std::vector<std::string> changed;
  for (const SettingRow& row : facts.settings)
    if (row.is_changed)
      changed.push_back(concat(row.name, " ", row.value.empty() ? "''" : shortened(row.value)));
  std::string text;
  for (const std::string& line : {facts.beginning, facts.title})
    if (!line.empty()) text += line + "\n";
  if (!changed.empty())
    text += wrapped("settings changed (--print-config shows all):", changed, width);
  text += forecast_lines(facts.memory, width);
  if (facts.resumed_step > 0) text += concat("resumed after step ", facts.resumed_step, "\n");
  return text;
}

std::string start_tables(const RunFacts& facts, int64_t width) {
  size_t group_width = 0;
  size_t name_width = 0;
  for (const SettingRow& row : facts.settings) {
    group_width = std::max(group_width, row.group.size());
    name_width = std::max(name_width, row.name.size());
  }
  std::string text =
      concat(facts.beginning, "\n", facts.title, "\n\nsettings (* changed from the default)\n");
  std::string_view group;
  for (const SettingRow& row : facts.settings) {
    const std::string line =
        concat("  ", padded(row.group == group ? "" : row.group, group_width), kGap,
               row.is_changed ? "* " : "  ", padded(row.name, name_width), kGap, row.value);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    group = row.group;
  }
  return concat(text, "\n", forecast_lines(facts.memory, width));
}

std::string indented(std::string_view text) {
  std::string result = "    ";
  for (const char c : clean_utf8(text)) {
    result += c;
    if (c == '\n') result += "    ";
  }
  return result;
}

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
  print_line(concat("validation after step ", record.step, ": loss ", printed("%.4f", record.loss),
                    !is_best              ? concat("  (best ", printed("%.4f", best), ")")
                    : std::isfinite(best) ? concat("  (was ", printed("%.4f", best), ")")
                                          : std::string()),
             is_best ? kGreen : "");
}

void Console::checkpoint(const CheckpointRecord& record) {
  print_line(concat("checkpoint of step ", record.step, ": ", record.path, ", ",
                    bytes_text(record.bytes), " in ", duration_text(record.milliseconds / 1000),
                    " (training waited ", duration_text(record.blocked_milliseconds / 1000), ")"));
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
    text += concat("; best validation loss ", printed("%.4f", best->loss), " at step ", best->step);
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
