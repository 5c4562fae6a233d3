#include "fsdp/train/step_line.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "fsdp/base/text.h"
#include "fsdp/train/outliers.h"

namespace fsdp::train {

namespace {

constexpr std::string_view kGap = "  ";
constexpr size_t kLossChars = 9;
constexpr size_t kNormChars = 9;
constexpr size_t kRateChars = 9;
constexpr size_t kMillisecondChars = 8;
constexpr size_t kTokenChars = 10;
constexpr size_t kTeraflopChars = 7;
constexpr size_t kMfuChars = 6;
constexpr size_t kPeakChars = 9;

std::string formatted(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

// Fixed digits line up; where they would show nothing or too much, an exponent.
std::string figure_text(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::abs(value);
  if (value != 0 && (size < 0.01 || size >= 10000)) return formatted("%.2e", value);
  return formatted(digits == 4 ? "%.4f" : "%.3f", value);
}

std::string right_aligned(std::string_view text, size_t width) {
  std::string result(width > text.size() ? width - text.size() : 0, ' ');
  return result.append(text);
}

size_t step_cell_chars(int64_t step_chars) {
  return std::max<size_t>(4, static_cast<size_t>(2 * step_chars + 1));
}

}  // namespace

StepColumns StepColumns::of(const StepRecord& first, int64_t width) {
  StepColumns columns{.step_chars = static_cast<int64_t>(std::to_string(first.total_steps).size()),
                      .has_teraflops = first.teraflops > 0,
                      .has_mfu = first.mfu > 0,
                      .has_peak = first.peak_bytes > 0};
  if (columns.width() > width) columns.has_teraflops = false;
  if (columns.width() > width) columns.has_peak = false;
  if (columns.width() > width) columns.has_mfu = false;
  return columns;
}

int64_t StepColumns::width() const { return static_cast<int64_t>(header().size()); }

std::string StepColumns::header() const {
  std::string text = right_aligned("step", step_cell_chars(step_chars));
  const auto add = [&](std::string_view name, size_t width) {
    text.append(kGap).append(right_aligned(name, width));
  };
  add("loss", kLossChars);
  add("grad norm", kNormChars);
  add("lr", kRateChars);
  add("ms", kMillisecondChars);
  add("tokens/s", kTokenChars);
  if (has_teraflops) add("TFLOP/s", kTeraflopChars);
  if (has_mfu) add("MFU", kMfuChars);
  if (has_peak) add("peak", kPeakChars);
  return text;
}

std::string StepColumns::line(const StepRecord& record) const {
  std::string text =
      right_aligned(concat(record.step, "/", record.total_steps), step_cell_chars(step_chars));
  const auto add = [&](std::string_view value, size_t width) {
    text.append(kGap).append(right_aligned(value, width));
  };
  add(figure_text(record.loss, 4), kLossChars);
  add(figure_text(record.gradient_norm, 3), kNormChars);
  add(formatted("%.2e", record.learning_rate), kRateChars);
  add(formatted("%.1f", record.milliseconds), kMillisecondChars);
  const double tokens = std::clamp(record.tokens_per_second, 0.0, 1e15);
  add(grouped_text(std::llround(std::isnan(tokens) ? 0 : tokens)), kTokenChars);
  if (has_teraflops)
    add(formatted(record.teraflops < 10 ? "%.2f" : "%.1f", record.teraflops), kTeraflopChars);
  if (has_mfu) add(formatted("%.1f %%", 100 * record.mfu), kMfuChars);
  if (has_peak) add(bytes_text(static_cast<double>(record.peak_bytes)), kPeakChars);
  return text;
}

std::string step_remark(const StepRecord& record) {
  if (record.is_skipped) return "skipped: gradients are not finite";
  if (!std::isfinite(record.loss)) return "the loss is not finite";
  if (std::abs(record.loss_z) < kOutlierZ) return "";
  return concat("loss z ", formatted("%+.1f", record.loss_z));
}

std::string duration_text(double seconds) {
  if (!(seconds < 1e9)) return "years";
  if (seconds == std::floor(seconds) && seconds < 10)
    return formatted("%.0f s", std::max(seconds, 0.0));
  if (seconds < 0.9995) return formatted("%.0f ms", 1000 * std::max(seconds, 0.0));
  if (seconds < 9.95) return formatted("%.1f s", seconds);
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

}  // namespace fsdp::train
