#include "fsdp/train/report/history_charts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/train/report/line_chart.h"

namespace fsdp::train {

namespace {

// About one point per pixel of a chart on a usual screen.
constexpr size_t kMaxPoints = 600;

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

// The tokens trained on by a step, at the ends of lines that have all steps between them: two where
// every step has as many tokens as the others.
std::vector<ChartPoint> token_marks(const RunHistory& history) {
  std::vector<ChartPoint> marks;
  for (const ChartPoint& next : means_of(history.tokens().coarse(kMaxPoints))) {
    if (!(next.value > 0)) continue;
    if (marks.size() >= 2) {
      const ChartPoint& a = marks[marks.size() - 2];
      const ChartPoint& b = marks.back();
      const double expected =
          a.value + (next.step - a.step) * (b.value - a.value) / (b.step - a.step);
      if (std::abs(expected - next.value) <= 1e-6 * next.value) marks.pop_back();
    }
    marks.push_back(next);
  }
  return marks;
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

// Fewer points say more by themselves.
constexpr size_t kLeastSmoothed = 40;

std::vector<ChartPoint> smoothed_points(std::span<const SeriesBucket> buckets) {
  std::vector<ChartPoint> points = means_of(buckets);
  if (buckets.size() < kLeastSmoothed) return points;
  const std::vector<double> smooth = smoothed_means(buckets);
  for (size_t i = 0; i < points.size(); ++i) points[i].value = smooth[i];
  return points;
}

// --- one run -------------------------------------------------------------------------------------

void mark_resumes(LineChart& chart, const RunHistory& history) {
  chart.marks = {history.resumed_steps().begin(), history.resumed_steps().end()};
  for (ChartLine& line : chart.lines) line.tokens = token_marks(history);
}

std::string loss_html(const RunHistory& history) {
  const std::vector<SeriesBucket> train = history.loss().coarse(kMaxPoints);
  const std::vector<ChartPoint> points = means_of(train);
  LineChart chart{.id = "loss",
                  .title = "Loss",
                  .unit = "nats per token",
                  .description = course_text(points),
                  .ranges = ranges_of(train),
                  .is_wide = true};
  const bool is_smoothed = train.size() >= kLeastSmoothed;
  if (is_smoothed) chart.lines.push_back({"train", ChartLine::Look::kFaint, points});
  chart.lines.push_back(
      {is_smoothed ? "train, smoothed" : "train", ChartLine::Look::kMain, smoothed_points(train)});
  if (!history.validation_loss().is_empty())
    chart.lines.push_back({"validation", ChartLine::Look::kDots,
                           means_of(history.validation_loss().coarse(kMaxPoints / 4))});
  mark_resumes(chart, history);
  if (!chart.marks.empty()) chart.note = "Dashed: the run was resumed.";
  return line_chart_html(chart);
}

std::string series_html(const Series& series, const RunHistory& history, LineChart chart) {
  const std::vector<SeriesBucket> buckets = series.coarse(kMaxPoints);
  chart.lines.push_back({chart.title, ChartLine::Look::kMain, means_of(buckets)});
  if (!chart.cuts_peaks) chart.ranges = ranges_of(buckets);
  mark_resumes(chart, history);
  chart.description = course_text(chart.lines[0].points);
  return line_chart_html(chart);
}

// --- several -------------------------------------------------------------------------------------

enum class Curve { kMeans, kSmoothed, kDots };

using SeriesOf = const Series& (RunHistory::*)() const;

// Half as many points for each, so that a page of many runs stays small.
std::string several_html(std::span<const NamedHistory> runs, SeriesOf series, Curve curve,
                         LineChart chart) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunHistory& history = *runs[i].history;
    const std::vector<SeriesBucket> buckets = (history.*series)().coarse(kMaxPoints / 2);
    chart.lines.push_back(
        {.name = runs[i].name,
         .look = curve == Curve::kDots ? ChartLine::Look::kDots : ChartLine::Look::kMain,
         .points = curve == Curve::kSmoothed ? smoothed_points(buckets) : means_of(buckets),
         .color = static_cast<int>(i),
         .tokens = token_marks(history)});
  }
  chart.description = concat("A line for each of ", runs.size(), " runs.");
  return line_chart_html(chart);
}

struct SeriesChart {
  SeriesOf series;
  LineChart chart;
};

const std::array<SeriesChart, 4>& series_charts() {
  static const std::array<SeriesChart, 4> kCharts = {{
      {&RunHistory::learning_rate,
       {.id = "learning-rate", .title = "Learning rate", .begins_at_zero = true}},
      {&RunHistory::gradient_norm,
       {.id = "gradient-norm", .title = "Gradient norm", .unit = "before clipping"}},
      {&RunHistory::tokens_per_second,
       {.id = "throughput",
        .title = "Throughput",
        .unit = "tokens/s, all ranks",
        .begins_at_zero = true,
        .cuts_peaks = true}},
      {&RunHistory::milliseconds,
       {.id = "step-time",
        .title = "Step time",
        .unit = "ms",
        .begins_at_zero = true,
        .cuts_peaks = true}},
  }};
  return kCharts;
}

}  // namespace

std::string history_charts_html(std::span<const NamedHistory> runs) {
  if (runs.size() == 1) {
    const RunHistory& history = *runs.front().history;
    std::string html = loss_html(history);
    for (const auto& [series, chart] : series_charts())
      html += series_html((history.*series)(), history, chart);
    return html;
  }
  std::string html = several_html(runs, &RunHistory::loss, Curve::kSmoothed,
                                  {.id = "loss",
                                   .title = "Training loss",
                                   .unit = "nats per token, smoothed",
                                   .is_wide = true});
  html += several_html(
      runs, &RunHistory::validation_loss, Curve::kDots,
      {.id = "validation", .title = "Validation loss", .unit = "nats per token", .is_wide = true});
  for (const auto& [series, chart] : series_charts())
    html += several_html(runs, series, Curve::kMeans, chart);
  return html;
}

}  // namespace fsdp::train
