#include "fsdp/train/report/report_parts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/line_chart.h"

namespace fsdp::train {

namespace {

std::string size_text(int64_t bytes) { return html_text(bytes_text(static_cast<double>(bytes))); }

// A sum is known if all of its parts are.
MemoryRow total_of(std::span<const MemoryRow> rows, bool is_on_host) {
  MemoryRow total{.kind = is_on_host ? "total on the host" : "total",
                  .forecast_bytes = 0,
                  .measured_bytes = 0,
                  .is_on_host = is_on_host};
  const auto add = [](int64_t& sum, int64_t bytes) {
    sum = sum == kUnknownBytes || bytes == kUnknownBytes ? kUnknownBytes : sum + bytes;
  };
  for (const MemoryRow& row : rows) {
    if (row.is_on_host != is_on_host) continue;
    add(total.forecast_bytes, row.forecast_bytes);
    add(total.measured_bytes, row.measured_bytes);
  }
  return total;
}

std::string percent_text(int64_t part, int64_t whole) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f%%",
                100 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1)));
  return text.data();
}

// A bar for the measured bytes, and a rule at the forecast.
std::string memory_row_html(const MemoryRow& row, int64_t longest, const char* css_class) {
  std::string track;
  std::string words;
  if (row.measured_bytes != kUnknownBytes) {
    track += concat("<i style=\"width:", percent_text(row.measured_bytes, longest), "\"></i>");
    words = size_text(row.measured_bytes);
  }
  if (row.forecast_bytes != kUnknownBytes) {
    track += concat("<u style=\"left:", percent_text(row.forecast_bytes, longest), "\"></u>");
    words += concat(words.empty() ? "" : " ", "<small>", words.empty() ? "forecast " : "of ",
                    size_text(row.forecast_bytes), "</small>");
  }
  return concat("<span class=\"", css_class, "\">", html_text(row.kind),
                "</span><span class=\"track\">", track, "</span><span class=\"", css_class, "\">",
                words, "</span>");
}

std::string z_text(double z) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%+.1f", z);
  return text.data();
}

}  // namespace

std::string peak_owner(const RunFacts& facts) {
  const bool is_on_gpu = std::any_of(
      facts.settings.begin(), facts.settings.end(),
      [](const SettingRow& row) { return row.name == "device" && row.value == "cuda"; });
  return is_on_gpu ? "of rank 0's GPU" : "of the process";
}

std::string memory_html(const RunFacts& facts) {
  const std::span<const MemoryRow> rows = facts.memory;
  if (rows.empty()) return "";
  int64_t longest = 1;
  std::vector<MemoryRow> totals;
  for (const bool is_on_host : {false, true}) {
    const bool is_used = std::any_of(rows.begin(), rows.end(), [&](const MemoryRow& row) {
      return row.is_on_host == is_on_host;
    });
    if (is_used) totals.push_back(total_of(rows, is_on_host));
  }
  for (const auto& each : {rows, std::span<const MemoryRow>(totals)})
    for (const MemoryRow& row : each)
      longest = std::max({longest, row.forecast_bytes, row.measured_bytes});
  std::string html =
      "<section class=\"card wide\" id=\"memory\"><header><h2>Memory</h2><span class=\"unit\">of "
      "the fullest "
      "rank</span><span class=\"legend\"><span class=\"key measured\">measured</span><span "
      "class=\"key "
      "forecast\">forecast</span></span></header><div class=\"bars\">";
  for (const MemoryRow& total : totals) {
    for (const MemoryRow& row : rows)
      if (row.is_on_host == total.is_on_host) html += memory_row_html(row, longest, "kind");
    html += memory_row_html(total, longest, "total");
  }
  return html +
         concat(
             "</div><p class=\"note\">This is the memory of the engine: weights, gradients, the "
             "optimizer's state and the buckets of one rank. Peak memory, above, is all memory ",
             peak_owner(facts),
             ": activations, libtorch and, in a process of several ranks, all of them "
             "come on top.</p></section>\n");
}

std::string checkpoints_html(const RunHistory& history) {
  if (history.checkpoints().empty()) return "";
  std::string html = concat(
      "<section class=\"card wide\" id=\"checkpoints\"><header><h2>Checkpoints</h2><span "
      "class=\"unit\">",
      history.num_checkpoints() > static_cast<int64_t>(history.checkpoints().size())
          ? concat("the newest of ", grouped_text(history.num_checkpoints()))
          : counted_text(history.num_checkpoints(), "checkpoint"),
      "</span></header><table class=\"wraps\"><thead><tr><th>step</th><th>directory</th><th "
      "class=\"number\">size</th>"
      "<th class=\"number extra\">written in</th><th class=\"number extra\">training "
      "waited</th></tr></thead><tbody>");
  for (const CheckpointRecord& record : history.checkpoints())
    html += concat("<tr><td>", grouped_text(record.step), "</td><td>", html_text(record.path),
                   "</td><td class=\"number\">", size_text(record.bytes),
                   "</td><td class=\"number extra\">", duration_text(record.milliseconds / 1000),
                   "</td><td class=\"number extra\">", figure_text(record.blocked_milliseconds),
                   " ms</td></tr>");
  return html + "</tbody></table></section>\n";
}

std::string outliers_html(const RunHistory& history) {
  if (history.outliers().empty()) return "";
  std::string html = concat(
      "<section class=\"card wide\" id=\"outliers\"><header><h2>Unusual losses</h2><span "
      "class=\"unit\">",
      counted_text(history.num_outliers(), "step"),
      ", by how many deviations the loss was off what the steps before let "
      "expect</span></header><p>");
  bool is_first = true;
  for (const StepRecord& record : history.outliers()) {
    html += concat(is_first ? "" : ", ", "step ", grouped_text(record.step), ": ",
                   figure_text(record.loss), " <small>(", z_text(record.loss_z), ")</small>");
    is_first = false;
  }
  return html + "</p></section>\n";
}

std::string settings_html(std::span<const SettingRow> rows) {
  if (rows.empty()) return "";
  std::vector<std::string> groups;
  for (const SettingRow& row : rows)
    if (std::find(groups.begin(), groups.end(), row.group) == groups.end())
      groups.push_back(row.group);
  std::string html =
      "<section class=\"card wide\" id=\"settings\"><header><h2>Settings</h2><span "
      "class=\"unit\">* changed "
      "from the default</span></header><div class=\"settings\">";
  for (const std::string& group : groups) {
    html += concat("<section><h3>", html_text(group), "</h3><table class=\"wraps\"><tbody>");
    for (const SettingRow& row : rows) {
      if (row.group != group) continue;
      html += concat("<tr", row.is_changed ? " class=\"changed\"" : "",
                     row.help.empty() ? "" : concat(" title=\"", html_text(row.help), "\""),
                     "><th scope=\"row\">", html_text(row.name), "</th><td>", html_text(row.value),
                     "</td></tr>");
    }
    html += "</tbody></table></section>";
  }
  return html + "</div></section>\n";
}

std::string environment_html(std::span<const EnvironmentRow> rows) {
  if (rows.empty()) return "";
  std::string html =
      "<section class=\"card wide\" id=\"environment\"><header><h2>Environment</h2></header><table "
      "class=\"wraps\"><tbody>";
  for (const EnvironmentRow& row : rows)
    html += concat("<tr><th scope=\"row\">", html_text(row.name), "</th><td>", html_text(row.value),
                   "</td></tr>");
  return html + "</tbody></table></section>\n";
}

}  // namespace fsdp::train
