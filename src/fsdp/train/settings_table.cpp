#include "fsdp/train/settings_table.h"

#include <algorithm>
#include <array>
#include <vector>

#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

// Longer values (paths, patterns) do not set the width of the columns.
constexpr size_t kMaxColumnValue = 20;
constexpr size_t kGap = 2;

std::string padded(const std::string& text, size_t width) {
  return text.size() >= width ? text : text + std::string(width - text.size(), ' ');
}

std::string right_aligned(const std::string& text, size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
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

  size_t cell() const { return 2 + name + kGap + value; }
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

// How many neighbouring cells a text takes.
size_t cells_for(size_t chars, size_t cell) {
  return chars <= cell ? 1 : 1 + (chars - cell + cell + kGap - 1) / (cell + kGap);
}

}  // namespace

std::string settings_table(std::span<const SettingRow> settings, int64_t width) {
  if (settings.empty()) return "";
  const Widths widths = widths_of(settings);
  const size_t margin = 2 + widths.group + kGap;
  const size_t room = static_cast<size_t>(std::max<int64_t>(width, 0));
  const size_t columns =
      std::max<size_t>(1, room <= margin ? 1 : (room - margin + kGap) / (widths.cell() + kGap));
  std::string table = "settings (* changed from the default)\n";
  for (const std::string& group : groups_of(settings)) {
    std::string line = "  " + padded(group, widths.group + kGap);
    size_t used = 0;
    for (const SettingRow& row : settings) {
      if (row.group != group) continue;
      const std::string cell =
          concat(row.is_changed ? "* " : "  ", padded(row.name, widths.name + kGap), row.value);
      const size_t needed = std::min(columns, cells_for(cell.size(), widths.cell()));
      if (used + needed > columns) {
        table += without_trailing_blanks(line) + "\n";
        line.assign(margin, ' ');
        used = 0;
      }
      line += padded(cell, needed * (widths.cell() + kGap));
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
    table += concat("  ", padded(name, name_width + kGap),
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
