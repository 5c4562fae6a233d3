#include "fsdp/train/report/comparison_page.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/history_charts.h"
#include "fsdp/train/report/line_chart.h"
#include "fsdp/train/report/page_frame.h"

namespace fsdp::train {

namespace {

std::string run_status(const RunHistory& history) {
  const auto& end = history.end();
  std::string text = !end                      ? "not ended"
                     : end->stopped_by.empty() ? "complete"
                                               : concat("stopped by ", end->stopped_by);
  if (!history.resumed_steps().empty()) text += ", resumed";
  return text;
}

std::string run_row_html(const LoggedRun& run, size_t index) {
  const RunHistory& history = run.history;
  const StepRecord& last = *history.last_step();
  const SeriesBucket recent = history.loss().recent();
  const auto& best = history.best_validation();
  std::string html =
      concat("<tr><th scope=\"row\"><span class=\"key ", run_color_classes(index), "\">",
             html_text(run.name), "</span></th><td>", html_text(run_status(history)), "</td>");
  const auto add = [&](const std::string& value) {
    html += concat("<td class=\"number\">", value, "</td>");
  };
  add(concat(grouped_text(last.step), " of ", grouped_text(last.total_steps)));
  add(count_text(last.tokens));
  add(figure_text(recent.is_empty() ? NAN : recent.mean()));
  add(best ? concat(figure_text(best->loss), " <small>step ", grouped_text(best->step), "</small>")
           : "");
  add(figure_text(std::round(history.tokens_per_second().median())));
  add(last.peak_bytes > 0 ? bytes_text(static_cast<double>(last.peak_bytes)) : "");
  add(duration_text(history.step_seconds()));
  return html + "</tr>";
}

std::string runs_html(std::span<const LoggedRun> runs) {
  std::string html =
      "<section class=\"card wide\" id=\"runs\"><header><h2>Runs</h2></header><div "
      "class=\"scrolls\"><table><thead><tr><th>run</th><th>state</th>";
  for (const char* const name : {"steps", "tokens", "training loss", "best validation", "tokens/s",
                                 "peak memory", "time in steps"})
    html += concat("<th class=\"number\">", name, "</th>");
  html += "</tr></thead><tbody>";
  for (size_t i = 0; i < runs.size(); ++i) html += run_row_html(runs[i], i);
  return html +
         "</tbody></table></div><p class=\"note\">The training loss is the mean of the last "
         "hundredth "
         "of a run's steps, tokens/s the median of all. Peak memory is that of rank 0's GPU, or of "
         "its process with all ranks in it.</p></section>\n";
}

// Values by run, in the order of the runs; "" where a run does not have the row.
struct ComparedRow {
  std::string name;
  std::vector<std::string> values;
};

// Rows of which `rows_of(run)` gives different values, in the order of their first run.
template <typename RowsOf>
std::vector<ComparedRow> different_rows(std::span<const LoggedRun> runs, const RowsOf& rows_of) {
  std::vector<ComparedRow> compared;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const auto& row : rows_of(runs[i].facts)) {
      auto found = std::find_if(compared.begin(), compared.end(),
                                [&](const ComparedRow& each) { return each.name == row.name; });
      if (found == compared.end())
        found = compared.insert(compared.end(), {row.name, std::vector<std::string>(runs.size())});
      found->values[i] = row.value;
    }
  }
  std::erase_if(compared, [](const ComparedRow& row) {
    return std::all_of(row.values.begin(), row.values.end(),
                       [&](const std::string& value) { return value == row.values.front(); });
  });
  return compared;
}

// A setting that no run changed follows from others, as the path of the log does.
bool is_chosen(std::span<const LoggedRun> runs, std::string_view name) {
  return std::any_of(runs.begin(), runs.end(), [&](const LoggedRun& run) {
    return std::any_of(run.facts.settings.begin(), run.facts.settings.end(),
                       [&](const SettingRow& row) { return row.is_changed && row.name == name; });
  });
}

std::string differences_html(std::span<const LoggedRun> runs, const std::string& id,
                             const std::string& title, std::span<const ComparedRow> rows) {
  if (rows.empty()) return "";
  std::string html = concat("<section class=\"card wide\" id=\"", id, "\"><header><h2>", title,
                            "</h2></header><div class=\"scrolls\"><table><thead><tr><th></th>");
  for (size_t i = 0; i < runs.size(); ++i)
    html += concat("<th><span class=\"key ", run_color_classes(i), "\">", html_text(runs[i].name),
                   "</span></th>");
  html += "</tr></thead><tbody>";
  for (const ComparedRow& row : rows) {
    html += concat("<tr><th scope=\"row\">", html_text(row.name), "</th>");
    for (const std::string& value : row.values) html += concat("<td>", html_text(value), "</td>");
    html += "</tr>";
  }
  return html + "</tbody></table></div></section>\n";
}

}  // namespace

std::string comparison_page(std::span<const LoggedRun> runs, double time) {
  std::vector<NamedHistory> histories;
  for (const LoggedRun& run : runs) histories.push_back({run.name, &run.history});
  std::vector<ComparedRow> settings =
      different_rows(runs, [](const RunFacts& facts) { return facts.settings; });
  std::erase_if(settings, [&](const ComparedRow& row) { return !is_chosen(runs, row.name); });
  const std::vector<ComparedRow> environment =
      different_rows(runs, [](const RunFacts& facts) { return facts.environment; });
  return page_html(
      {.title = counted_text(static_cast<int64_t>(runs.size()), "run"),
       .body =
           concat("<div class=\"grid\">\n", runs_html(runs), history_charts_html(histories),
                  differences_html(runs, "settings", "Settings that differ", settings),
                  differences_html(runs, "environment", "Environment that differs", environment),
                  "</div>"),
       .time = time});
}

}  // namespace fsdp::train
