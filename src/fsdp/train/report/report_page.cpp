#include "fsdp/train/report/report_page.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/history_charts.h"
#include "fsdp/train/report/line_chart.h"
#include "fsdp/train/report/page_frame.h"
#include "fsdp/train/report/report_parts.h"
#include "fsdp/train/report/timeline_chart.h"

namespace fsdp::train {

namespace {

constexpr double kLeastPause = 5;        // in s
constexpr double kPausePerWriting = 99;  // 1 % of the time

double steady_seconds() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string status_html(const ReportContent& content) {
  const RunHistory& history = content.history;
  const auto& last = history.last_step();
  if (!last)
    return "<p class=\"status\"><span class=\"dot running\"></span><b>No step is done yet.</b></p>";
  const std::string of = concat(grouped_text(last->step), " of ", grouped_text(last->total_steps));
  std::string text;
  const char* dot = "running";
  // For a run in parts, the end record only knows the last part.
  const bool is_in_parts = !history.resumed_steps().empty();
  if (!history.end()) {
    text = concat(content.is_live ? "<b>Running:</b>" : "<b>Not ended:</b>", " step ", of);
  } else if (history.end()->stopped_by.empty()) {
    dot = "";
    const double seconds = is_in_parts ? history.step_seconds() : history.end()->seconds;
    text = concat("<b>Complete:</b> ", of, " steps in ", duration_text(seconds));
  } else {
    dot = "stopped";
    text = concat("<b>Stopped</b> by ", html_text(history.end()->stopped_by), " after step ", of);
  }
  if (is_in_parts)
    text += concat(", resumed after step ", grouped_text(history.resumed_steps().back()));
  if (history.num_skipped() > 0)
    text += concat(", ", counted_text(history.num_skipped(), "update"),
                   " skipped for gradients that were not finite");
  return concat("<p class=\"status\"><span class=\"dot ", dot, "\"></span>", text, ". <small>",
                utc_text(content.time), "</small></p>");
}

std::string tile_html(const std::string& name, const std::string& value,
                      const std::string& detail) {
  return concat("<div class=\"tile\"><dt>", name, "</dt><dd>", value, " <small>", detail,
                "</small></dd></div>");
}

// Of quantised weights in the last update; "" where none is.
std::string lost_weights_html(const StepRecord& step) {
  const auto share_of = [&](std::string_view name) {
    for (const NamedValue& term : step.terms)
      if (term.name == name) return 100 * term.value;
    return double{NAN};
  };
  const double underflow = share_of("underflow");
  if (std::isnan(underflow)) return "";
  return tile_html("Weights lost in codes", concat(figure_text(underflow), " %"),
                   concat("became 0; ", figure_text(share_of("overflow")), " % out of range"));
}

// Which steps a figure is the mean of.
std::string recent_steps_text(const SeriesBucket& recent) {
  if (recent.first_step == recent.last_step) return concat("step ", grouped_text(recent.last_step));
  return concat("mean of steps ", grouped_text(recent.first_step), " to ",
                grouped_text(recent.last_step));
}

std::string tiles_html(const RunFacts& facts, const RunHistory& history) {
  const auto& last = history.last_step();
  if (!last) return "";
  std::string html = "<dl class=\"tiles\" id=\"summary\">";
  const SeriesBucket recent = history.loss().recent();
  html += tile_html("Training loss", figure_text(recent.is_empty() ? NAN : recent.mean()),
                    recent_steps_text(recent));
  if (const auto& best = history.best_validation())
    html += tile_html("Validation loss", figure_text(best->loss),
                      concat("best, step ", grouped_text(best->step)));
  html += tile_html("Throughput", figure_text(std::round(history.tokens_per_second().median())),
                    "tokens/s");
  html += tile_html("Step time", figure_text(history.milliseconds().median()), "ms");
  if (last->mfu > 0)
    html += tile_html("Model FLOPs use", figure_text(std::round(1000 * last->mfu) / 10), "%");
  if (last->peak_bytes > 0)
    html += tile_html("Peak memory", bytes_text(static_cast<double>(last->peak_bytes)),
                      peak_owner(facts));
  if (last->tokens > 0)
    html += tile_html("Tokens", count_text(last->tokens),
                      concat("in ", duration_text(history.step_seconds())));
  html += lost_weights_html(*last);
  return html + "</dl>\n";
}

std::string sample_html(const TextSample* sample) {
  if (sample == nullptr) return "";
  return concat(
      "<section class=\"card wide\" id=\"sample\"><header><h2>Generated text</h2><span "
      "class=\"unit\">after step ",
      grouped_text(sample->step), "; the prompt is in colour</span></header><pre><b>",
      html_text(sample->prompt), "</b>", html_text(sample->continuation), "</pre></section>\n");
}

}  // namespace

void check_replaceable(const std::string& path, const std::string& what,
                       const std::string& option) {
  struct stat status {};
  FSDP_CHECK(::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode), path,
             ": is not a file, so no ", what, " can replace it; choose another place with ",
             option);
}

ReportFile::ReportFile(std::string path, const std::string& option, std::function<double()> now)
    : path_(std::move(path)), now_(now ? std::move(now) : steady_seconds) {
  make_directories(directory_of(path_));
  check_replaceable(path_, "report", option);
}

bool ReportFile::is_due() const { return now_() >= next_at_; }

void ReportFile::write(const std::function<std::string()>& page) {
  const double begin = now_();
  try {
    write_file_durably(path_, page());
    was_written_ = true;
    is_failing_ = false;
  } catch (const Error& error) {
    if (!was_written_) throw;
    if (!std::exchange(is_failing_, true))
      log(LogLevel::kWarning, "the report cannot be written: ", error.what(),
          "; training goes on without it");
  }
  const double end = now_();
  next_at_ = end + std::max(kLeastPause, kPausePerWriting * (end - begin));
}

std::string report_page(const ReportContent& content) {
  const RunFacts& facts = content.facts;
  const RunHistory& history = content.history;
  return page_html(
      {.title = facts.title.empty() ? "Training run" : facts.title,
       .body =
           concat(status_html(content), "\n", tiles_html(facts, history), "<div class=\"grid\">\n",
                  history_charts_html({{.name = {}, .history = &history}}), memory_html(facts),
                  timeline_chart_html(content.timeline), sample_html(content.sample),
                  checkpoints_html(history), outliers_html(history), settings_html(facts.settings),
                  environment_html(facts.environment), "</div>"),
       .time = content.time,
       .is_live = content.is_live && !history.end()});
}

}  // namespace fsdp::train
