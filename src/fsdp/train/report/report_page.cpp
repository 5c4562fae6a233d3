#include "fsdp/train/report/report_page.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/line_chart.h"
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

// About one point per pixel of a chart on a usual screen.
constexpr size_t kMaxPoints = 600;

std::string utc_text(double time) {
  const auto seconds = static_cast<std::time_t>(time);
  std::tm parts{};
  std::array<char, 64> text{};
  if (::gmtime_r(&seconds, &parts) == nullptr) return "";
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text.data();
}

std::vector<ChartPoint> means_of(std::span<const SeriesBucket> buckets) {
  std::vector<ChartPoint> points;
  for (const SeriesBucket& bucket : buckets)
    points.push_back({bucket.middle_step(), bucket.is_empty() ? NAN : bucket.mean()});
  return points;
}

std::vector<ChartRange> ranges_of(std::span<const SeriesBucket> buckets) {
  std::vector<ChartRange> ranges;
  const bool has_one_step_each = std::all_of(
      buckets.begin(), buckets.end(), [](const SeriesBucket& each) { return each.count <= 1; });
  if (has_one_step_each) return ranges;
  for (const SeriesBucket& bucket : buckets)
    if (!bucket.is_empty()) ranges.push_back({bucket.middle_step(), bucket.min, bucket.max});
  return ranges;
}

std::vector<double> marks_of(const RunHistory& history) {
  return {history.resumed_steps().begin(), history.resumed_steps().end()};
}

// "From 5.61 at step 1 to 1.92 at step 300."
std::string course_text(std::span<const ChartPoint> points) {
  const auto is_known = [](const ChartPoint& point) { return std::isfinite(point.value); };
  const auto first = std::find_if(points.begin(), points.end(), is_known);
  const auto last = std::find_if(points.rbegin(), points.rend(), is_known);
  if (first == points.end()) return "";
  return concat("From ", figure_text(first->value), " at step ", figure_text(first->step), " to ",
                figure_text(last->value), " at step ", figure_text(last->step), ".");
}

std::string loss_html(const RunHistory& history) {
  const std::vector<SeriesBucket> train = history.loss().coarse(kMaxPoints);
  LineChart chart{.id = "loss",
                  .title = "Loss",
                  .unit = "nats per token, over steps",
                  .ranges = ranges_of(train),
                  .marks = marks_of(history),
                  .is_wide = true};
  const bool is_smoothed = train.size() >= 40;
  std::vector<ChartPoint> points = means_of(train);
  chart.description = course_text(points);
  if (is_smoothed) {
    chart.lines.push_back({"train", ChartLine::Look::kFaint, points});
    const std::vector<double> smooth = smoothed_means(train);
    for (size_t i = 0; i < points.size(); ++i) points[i].value = smooth[i];
  }
  chart.lines.push_back(
      {is_smoothed ? "train, smoothed" : "train", ChartLine::Look::kMain, points});
  if (!history.validation_loss().is_empty())
    chart.lines.push_back({"validation", ChartLine::Look::kDots,
                           means_of(history.validation_loss().coarse(kMaxPoints / 4))});
  if (!chart.marks.empty()) chart.note = "Dashed: the run was resumed.";
  return line_chart_html(chart);
}

std::string series_html(const Series& series, const RunHistory& history, LineChart chart) {
  const std::vector<SeriesBucket> buckets = series.coarse(kMaxPoints);
  chart.lines.push_back({chart.title, ChartLine::Look::kMain, means_of(buckets)});
  if (!chart.cuts_peaks) chart.ranges = ranges_of(buckets);
  chart.marks = marks_of(history);
  chart.description = course_text(chart.lines[0].points);
  return line_chart_html(chart);
}

std::string charts_html(const RunHistory& history) {
  std::string html = "<div class=\"grid\">\n" + loss_html(history);
  html += series_html(history.learning_rate(), history,
                      {.id = "learning-rate", .title = "Learning rate", .begins_at_zero = true});
  html += series_html(history.gradient_norm(), history,
                      {.id = "gradient-norm", .title = "Gradient norm", .unit = "before clipping"});
  html += series_html(history.tokens_per_second(), history,
                      {.id = "throughput",
                       .title = "Throughput",
                       .unit = "tokens/s, all ranks",
                       .begins_at_zero = true,
                       .cuts_peaks = true});
  html += series_html(history.milliseconds(), history,
                      {.id = "step-time",
                       .title = "Step time",
                       .unit = "ms",
                       .begins_at_zero = true,
                       .cuts_peaks = true});
  return html;
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
    text = concat("<b>Running:</b> step ", of);
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

// "2.46 M": three digits are enough for a glance.
std::string count_text(int64_t count) {
  const auto value = static_cast<double>(count);
  if (value >= 1e12) return figure_text(std::round(value / 1e10) / 100) + " T";
  if (value >= 1e9) return figure_text(std::round(value / 1e7) / 100) + " G";
  if (value >= 1e6) return figure_text(std::round(value / 1e4) / 100) + " M";
  return grouped_text(count);
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

ReportFile::ReportFile(std::string path, std::function<double()> now)
    : path_(std::move(path)), now_(now ? std::move(now) : steady_seconds) {
  make_directories(directory_of(path_));
  // Writing replaces the path, so that a device such as /dev/null would be gone.
  struct stat status {};
  FSDP_CHECK(::stat(path_.c_str(), &status) != 0 || S_ISREG(status.st_mode), path_,
             ": is not a file, so no report can replace it; choose another place with --report, or "
             "--report none");
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
  const std::string title = html_text(facts.title.empty() ? "Training run" : facts.title);
  std::string page = concat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><meta name=\"generator\" "
      "content=\"fsdp.cpp " FSDP_VERSION "\">",
      // The page loads nothing, whatever its texts say.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">",
      content.history.end() ? "" : "<meta http-equiv=\"refresh\" content=\"15\">",
      // Keeps the browser from asking for a favicon.
      "<link rel=\"icon\" href=\"data:,\"><title>", title, "</title><style>", report_style(),
      "</style></head><body><main>\n<h1>", title, "</h1>\n", status_html(content), "\n",
      tiles_html(facts, content.history), charts_html(content.history), memory_html(facts),
      timeline_chart_html(content.timeline), sample_html(content.sample),
      checkpoints_html(content.history), outliers_html(content.history),
      settings_html(facts.settings), environment_html(facts.environment));
  page += concat("</div>\n<footer>fsdp.cpp " FSDP_VERSION ", ", utc_text(content.time),
                 "</footer>\n</main><script>", report_script(), "</script></body></html>\n");
  return page;
}

}  // namespace fsdp::train
