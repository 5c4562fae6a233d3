#include "fsdp/train/report/line_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <span>

#include "fsdp/base/text.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/chart_axis.h"

namespace fsdp::train {

namespace {

// Browsers stretch the drawing to the page's width, but not its strokes and texts.
constexpr double kPlotWidth = 1000;
constexpr double kPlotHeight = 300;

// One digit after the point is a tenth of a pixel; most coordinates have none.
std::string coordinate(double value) {
  std::string text = formatted("%.1f", value);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

struct Plot {
  ChartAxis steps;
  ChartAxis values;

  double x(double step) const { return kPlotWidth * steps.position(step); }
  double y(double value) const {
    // Clamped: browsers draw large numbers badly, and nobody sees them.
    return kPlotHeight * (1 - std::clamp(values.position(value), -1.0, 2.0));
  }
  std::string point(double step, double value) const {
    return concat(coordinate(x(step)), ",", coordinate(y(value)));
  }
};

struct ValueExtent {
  double low = INFINITY;
  double high = -INFINITY;

  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool is_empty() const { return low > high; }
};

ValueExtent step_extent(const LineChart& chart) {
  ValueExtent extent;
  for (const ChartLine& line : chart.lines)
    for (const ChartPoint& point : line.points) extent.take(point.step);
  return extent;
}

ValueExtent value_extent(const LineChart& chart) {
  ValueExtent extent;
  for (const ChartLine& line : chart.lines)
    for (const ChartPoint& point : line.points) extent.take(point.value);
  for (const ChartRange& range : chart.ranges) {
    extent.take(range.low);
    extent.take(range.high);
  }
  return extent;
}

// 1.5 times the value that 98 of 100 points stay below, if the highest point is above that.
double cut_at(const LineChart& chart, double high) {
  std::vector<double> values;
  for (const ChartLine& line : chart.lines)
    for (const ChartPoint& point : line.points)
      if (std::isfinite(point.value)) values.push_back(point.value);
  const auto place = values.begin() + static_cast<std::ptrdiff_t>(values.size() * 98 / 100);
  if (values.size() < 10 || place == values.end()) return high;
  std::nth_element(values.begin(), place, values.end());
  return std::min(high, 1.5 * *place);
}

ChartAxis value_axis(const LineChart& chart, ValueExtent extent) {
  using Scale = ChartAxis::Scale;
  if (chart.cuts_peaks) extent.high = std::max(extent.low, cut_at(chart, extent.high));
  if (chart.begins_at_zero)
    return ChartAxis::rounded(std::min(extent.low, 0.0), extent.high, Scale::kLinear);
  // Beyond a factor of ten, small values would lie flat on the axis.
  const bool is_wide = extent.low > 0 && extent.high > 10 * extent.low;
  return ChartAxis::rounded(extent.low, extent.high,
                            is_wide ? Scale::kLogarithmic : Scale::kLinear);
}

std::string line_path(const ChartLine& line, const Plot& plot) {
  std::string path;
  bool is_down = false;  // whether the pen draws
  for (const ChartPoint& point : line.points) {
    if (!std::isfinite(point.value)) {
      is_down = false;
      continue;
    }
    path += is_down ? 'L' : 'M';
    path += plot.point(point.step, point.value);
    // A stroke without length and with round ends is a dot, however the drawing is stretched.
    if (line.look == ChartLine::Look::kDots) path += "h0";
    is_down = line.look != ChartLine::Look::kDots;
  }
  return path;
}

std::string range_path(const std::vector<ChartRange>& ranges, const Plot& plot) {
  std::string path;
  for (const ChartRange& range : ranges)
    path += concat(path.empty() ? "M" : "L", plot.point(range.step, range.high));
  for (auto range = ranges.rbegin(); range != ranges.rend(); ++range)
    path += "L" + plot.point(range->step, range->low);
  return path.empty() ? path : path + "Z";
}

const char* css_class(ChartLine::Look look) {
  switch (look) {
    case ChartLine::Look::kFaint:
      return "faint";
    case ChartLine::Look::kMain:
      return "main";
    case ChartLine::Look::kDots:
      return "dots";
  }
  return "";
}

std::string css_classes(const ChartLine& line) {
  return concat(css_class(line.look), line.color < 0 ? "" : " ",
                line.color < 0 ? "" : run_color_classes(static_cast<size_t>(line.color)));
}

std::string drawing(const LineChart& chart, const Plot& plot) {
  std::string svg =
      concat("<svg viewBox=\"0 0 ", kPlotWidth, " ", kPlotHeight,
             "\" preserveAspectRatio=\"none\" role=\"img\" aria-labelledby=\"", chart.id, "-title ",
             chart.id, "-desc\"><title id=\"", chart.id, "-title\">", html_text(chart.title),
             "</title><desc id=\"", chart.id, "-desc\">", html_text(chart.description), "</desc>");
  std::string grid;
  for (const AxisTick& tick : plot.values.ticks())
    grid += concat("M0,", coordinate(plot.y(tick.value)), "H", kPlotWidth);
  svg += concat("<path class=\"grid\" d=\"", grid, "\"/>");
  std::string marks;
  for (const double mark : chart.marks)
    if (mark >= plot.steps.low() && mark <= plot.steps.high())
      marks += concat("M", coordinate(plot.x(mark)), ",0V", kPlotHeight);
  if (!marks.empty()) svg += concat("<path class=\"mark\" d=\"", marks, "\"/>");
  if (const std::string path = range_path(chart.ranges, plot); !path.empty())
    svg += concat("<path class=\"range\" d=\"", path, "\"/>");
  for (size_t i = 0; i < chart.lines.size(); ++i) {
    const ChartLine& line = chart.lines[i];
    const auto add = [&](const std::string& classes, const std::string& path) {
      svg += concat("<path data-line=\"", i, "\" class=\"", classes, "\" d=\"", path, "\"/>");
    };
    if (line.look == ChartLine::Look::kDots) {  // the line through them comes below
      ChartLine thread = line;
      thread.look = ChartLine::Look::kMain;
      add(concat("thread", css_classes(line).substr(std::string_view("dots").size())),
          line_path(thread, plot));
    }
    add(css_classes(line), line_path(line, plot));
  }
  return svg + "</svg>";
}

// "[[1,2.5],[3,4]]"
std::string pairs_json(std::span<const ChartPoint> points) {
  std::string json = "[";
  for (const ChartPoint& point : points)
    json += concat(json.size() == 1 ? "" : ",", "[", coordinate(point.step), ",",
                   formatted("%.0f", point.value), "]");
  return json + "]";
}

std::string line_json(const ChartLine& line) {
  std::string steps;
  std::string values;
  for (const ChartPoint& point : line.points) {
    steps += concat(steps.empty() ? "" : ",", coordinate(point.step));
    values += concat(values.empty() ? "" : ",",
                     std::isfinite(point.value) ? formatted("%.5g", point.value) : "null");
  }
  // As markup, which the script shows, and then as JSON.
  return concat("{\"name\":", nlohmann::json(html_text(line.name)).dump(), ",\"look\":\"",
                css_class(line.look), "\",\"x\":[", steps, "],\"y\":[", values,
                "],\"tokens\":", pairs_json(line.tokens), "}");
}

// The figures from which the page's script reads out a point, and draws the chart again.
std::string data_json(const LineChart& chart, const Plot& plot) {
  std::string lines;
  for (const ChartLine& line : chart.lines)
    lines += concat(lines.empty() ? "" : ",", line_json(line));
  std::string ranges;
  for (const ChartRange& range : chart.ranges)
    ranges += concat(ranges.empty() ? "" : ",", "[", coordinate(range.step), ",",
                     formatted("%.5g", range.low), ",", formatted("%.5g", range.high), "]");
  std::string marks;
  for (const double mark : chart.marks) marks += concat(marks.empty() ? "" : ",", coordinate(mark));
  const bool is_logarithmic = plot.values.scale() == ChartAxis::Scale::kLogarithmic;
  return concat("{\"from\":", coordinate(plot.steps.low()),
                ",\"to\":", coordinate(plot.steps.high()),
                ",\"low\":", formatted("%.6g", plot.values.low()),
                ",\"high\":", formatted("%.6g", plot.values.high()),
                ",\"log\":", is_logarithmic ? "true" : "false", ",\"lines\":[", lines,
                "],\"ranges\":[", ranges, "],\"marks\":[", marks, "]}");
}

std::string labels(const Plot& plot) {
  std::string html = "<div class=\"ylabels\" aria-hidden=\"true\">";
  for (const AxisTick& tick : plot.values.ticks())
    html +=
        concat("<span style=\"bottom:", formatted("%.2f", 100 * plot.values.position(tick.value)),
               "%\">", tick.label, "</span>");
  html += "</div><div class=\"xlabels\" aria-hidden=\"true\">";
  for (const AxisTick& tick : plot.steps.ticks())
    if (tick.value == std::floor(tick.value))
      html +=
          concat("<span style=\"left:", formatted("%.2f", 100 * plot.steps.position(tick.value)),
                 "%\">", tick.label, "</span>");
  return html + "</div>";
}

// Names the highest value if the chart cuts it off.
std::string cut_note(const LineChart& chart, const Plot& plot) {
  ChartPoint highest{0, -INFINITY};
  for (const ChartLine& line : chart.lines)
    for (const ChartPoint& point : line.points)
      if (std::isfinite(point.value) && point.value > highest.value) highest = point;
  if (!chart.cuts_peaks || highest.value <= plot.values.high()) return "";
  return concat("<p class=\"note\">The highest value, ", figure_text(highest.value), " at step ",
                figure_text(std::floor(highest.step)), ", is outside.</p>");
}

}  // namespace

std::string figure_text(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::abs(value);
  if (size >= 1e15) return formatted("%.3g", value);
  if (size >= 1000 || value == std::floor(value)) return grouped_text(std::llround(value));
  if (size >= 100) return formatted("%.0f", value);
  return formatted(size >= 1e-3 ? "%.4g" : "%.2e", value);
}

// Colours are few; the next runs have them again, dashed.
std::string run_color_classes(size_t index) {
  constexpr size_t kNumColors = 8;
  return concat("c", index % kNumColors, index >= kNumColors ? " again" : "");
}

std::string count_text(int64_t count) {
  const auto value = static_cast<double>(count);
  if (value >= 1e12) return figure_text(std::round(value / 1e10) / 100) + " T";
  if (value >= 1e9) return figure_text(std::round(value / 1e7) / 100) + " G";
  if (value >= 1e6) return figure_text(std::round(value / 1e4) / 100) + " M";
  return grouped_text(count);
}

std::string line_chart_html(const LineChart& chart) {
  const ValueExtent steps = step_extent(chart);
  const ValueExtent values = value_extent(chart);
  if (steps.is_empty() || values.is_empty()) return "";
  const Plot plot{ChartAxis(steps.low, steps.high, ChartAxis::Scale::kLinear),
                  value_axis(chart, values)};
  std::string html =
      concat("<section class=\"card chart", chart.is_wide ? " wide" : "", "\" id=\"", chart.id,
             "\"><header><h2>", html_text(chart.title), "</h2><span class=\"unit\">",
             html_text(chart.unit),
             plot.values.scale() == ChartAxis::Scale::kLogarithmic ? ", log scale" : "",
             "</span><span class=\"legend\">");
  if (chart.lines.size() > 1)
    for (const ChartLine& line : chart.lines)
      html +=
          concat("<span class=\"key ", css_classes(line), "\">", html_text(line.name), "</span>");
  html += concat(
      "</span></header><div class=\"plot\"><div class=\"area", chart.cuts_peaks ? " cut" : "",
      "\">", drawing(chart, plot), "</div>", labels(plot), "</div>", cut_note(chart, plot),
      chart.note.empty() ? "" : concat("<p class=\"note\">", chart.note, "</p>"),
      "<script type=\"application/json\">", data_json(chart, plot), "</script></section>\n");
  return html;
}

}  // namespace fsdp::train
