#include "fsdp/train/log/console_tables.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/train/log/run_history.h"

namespace fsdp::train {

namespace {

constexpr std::string_view kGap = "  ";
constexpr size_t kGapChars = kGap.size();
constexpr size_t kLossChars = 9;
constexpr size_t kNormChars = 9;
constexpr size_t kRateChars = 9;
constexpr size_t kMillisecondChars = 8;
constexpr size_t kTokenChars = 10;
constexpr size_t kTeraflopChars = 7;
constexpr size_t kMfuChars = 6;
constexpr size_t kPeakChars = 9;

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

// Longer values (paths, patterns) do not set the width of the columns.
constexpr size_t kMaxColumnValue = 20;

std::string padded(const std::string& text, size_t width) {
  return text.size() >= width ? text : text + std::string(width - text.size(), ' ');
}

std::string without_trailing_blanks(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

std::vector<std::string> groups_of(std::span<const SettingRow> settings) {
  std::vector<std::string> groups;
  for (const SettingRow& row : settings)
    if (std::find(groups.begin(), groups.end(), row.group) == groups.end())
      groups.push_back(row.group);
  return groups;
}

struct Widths {
  size_t group = 0;
  size_t name = 0;
  size_t value = 0;

  size_t cell() const { return 2 + name + kGapChars + value; }
};

Widths widths_of(std::span<const SettingRow> settings) {
  Widths widths;
  for (const SettingRow& row : settings) {
    widths.group = std::max(widths.group, row.group.size());
    widths.name = std::max(widths.name, row.name.size());
    if (row.value.size() <= kMaxColumnValue)
      widths.value = std::max(widths.value, row.value.size());
  }
  return widths;
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
    parts.push_back(concat(row.kind, " ", bytes_text(static_cast<double>(row.forecast_bytes))));
  }
  if (parts.empty()) return "";
  const std::string on_host =
      totals[1] == 0 ? ""
                     : concat(" and ", bytes_text(static_cast<double>(totals[1])), " on the host");
  return wrapped(concat("memory per rank (forecast): ", bytes_text(static_cast<double>(totals[0])),
                        on_host, " ="),
                 parts, width);
}

// How many neighbouring cells a text takes.
size_t cells_for(size_t chars, size_t cell) {
  return chars <= cell ? 1 : 1 + (chars - cell + cell + kGapChars - 1) / (cell + kGapChars);
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
  add(column_number(record.loss, 4), kLossChars);
  add(column_number(record.gradient_norm, 3), kNormChars);
  add(printed("%.2e", record.learning_rate), kRateChars);
  add(printed("%.1f", record.milliseconds), kMillisecondChars);
  const double tokens = std::clamp(record.tokens_per_second, 0.0, 1e15);
  add(grouped_text(std::llround(std::isnan(tokens) ? 0 : tokens)), kTokenChars);
  if (has_teraflops)
    add(printed(record.teraflops < 10 ? "%.2f" : "%.1f", record.teraflops), kTeraflopChars);
  if (has_mfu) add(printed("%.1f %%", 100 * record.mfu), kMfuChars);
  if (has_peak) add(bytes_text(static_cast<double>(record.peak_bytes)), kPeakChars);
  return text;
}

std::string step_remark(const StepRecord& record) {
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
    if (row.is_changed) changed.push_back(concat(row.name, " ", shortened(row.value)));
  std::string text = facts.title.empty() ? "" : facts.title + "\n";
  if (!changed.empty())
    text += wrapped("settings changed (--print-config shows all):", changed, width);
  text += forecast_lines(facts.memory, width);
  if (facts.resumed_step > 0) text += concat("resumed after step ", facts.resumed_step, "\n");
  return text;
}

std::string start_tables(const RunFacts& facts, int64_t width) {
  std::string text = facts.title.empty() ? "" : facts.title + "\n\n";
  for (const std::string& table :
       {settings_table(facts.settings, width), forecast_table(facts.memory)})
    if (!table.empty()) text += table + "\n";
  return text;
}

std::string settings_table(std::span<const SettingRow> settings, int64_t width) {
  if (settings.empty()) return "";
  const Widths widths = widths_of(settings);
  const size_t margin = 2 + widths.group + kGapChars;
  const size_t room = static_cast<size_t>(std::max<int64_t>(width, 0));
  const size_t columns = std::max<size_t>(
      1, room <= margin ? 1 : (room - margin + kGapChars) / (widths.cell() + kGapChars));
  std::string table = "settings (* changed from the default)\n";
  for (const std::string& group : groups_of(settings)) {
    std::string line = "  " + padded(group, widths.group + kGapChars);
    size_t used = 0;
    for (const SettingRow& row : settings) {
      if (row.group != group) continue;
      const std::string cell = concat(row.is_changed ? "* " : "  ",
                                      padded(row.name, widths.name + kGapChars), row.value);
      const size_t needed = std::min(columns, cells_for(cell.size(), widths.cell()));
      if (used + needed > columns) {
        table += without_trailing_blanks(line) + "\n";
        line.assign(margin, ' ');
        used = 0;
      }
      line += padded(cell, needed * (widths.cell() + kGapChars));
      used += needed;
    }
    table += without_trailing_blanks(line) + "\n";
  }
  return table;
}

std::string forecast_table(std::span<const MemoryRow> memory) {
  size_t name_width = std::string("total on the host").size();
  std::array<int64_t, 2> totals{};
  std::array<int64_t, 2> num_rows{};
  for (const MemoryRow& row : memory) {
    if (row.forecast_bytes == kUnknownBytes) continue;
    name_width = std::max(name_width, row.kind.size());
    totals[row.is_on_host] += row.forecast_bytes;
    ++num_rows[row.is_on_host];
  }
  if (num_rows[0] + num_rows[1] == 0) return "";
  std::string table = "memory per rank (forecast)\n";
  const auto add = [&](const std::string& name, int64_t bytes) {
    table += concat("  ", padded(name, name_width + kGapChars),
                    right_aligned(bytes_text(static_cast<double>(bytes)), 10), "\n");
  };
  for (const bool is_on_host : {false, true}) {
    for (const MemoryRow& row : memory)
      if (row.is_on_host == is_on_host && row.forecast_bytes != kUnknownBytes)
        add(row.kind, row.forecast_bytes);
    if (num_rows[is_on_host] > 0)
      add(is_on_host ? "total on the host" : "total", totals[is_on_host]);
  }
  return table;
}

}  // namespace fsdp::train
