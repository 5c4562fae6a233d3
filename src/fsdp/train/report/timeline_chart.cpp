#include "fsdp/train/report/timeline_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "fsdp/base/text.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/chart_axis.h"

namespace fsdp::train {

namespace {

constexpr double kTimelineWidth = 1000;
// Spans that are nearer than this become one bar: about a pixel, at most 500 bars per row.
constexpr double kNear = 1;

size_t order_of(std::string_view row) {
  constexpr std::array<std::string_view, 4> kOrder = {"compute", "gather", "reduce", "update"};
  return static_cast<size_t>(std::find(kOrder.begin(), kOrder.end(), row) - kOrder.begin());
}

struct TimeExtent {
  double begin = 0;
  double end = 0;
};

TimeExtent extent_of(std::span<const TimelineSpan> spans) {
  TimeExtent extent{INFINITY, -INFINITY};
  for (const TimelineSpan& span : spans) {
    extent.begin = std::min(extent.begin, span.begin_us);
    extent.end = std::max(extent.end, span.end_us);
  }
  return extent;
}

// Joins the spans of one row, sorted by their beginning. Spans inside others disappear.
TimelineRow joined(std::vector<TimelineSpan> spans, double near_us) {
  std::sort(spans.begin(), spans.end(), [](const TimelineSpan& a, const TimelineSpan& b) {
    return a.begin_us != b.begin_us ? a.begin_us < b.begin_us : a.end_us > b.end_us;
  });
  TimelineRow row{.name = spans.front().row, .bars = {}};
  double busy_until = -INFINITY;
  int64_t num_joined = 1;
  const auto name_joined = [&] {
    if (num_joined > 1) row.bars.back().label += concat(" and ", num_joined - 1, " more");
  };
  for (const TimelineSpan& span : spans) {
    row.busy_us += std::max(0.0, span.end_us - std::max(busy_until, span.begin_us));
    if (span.end_us <= busy_until) continue;
    busy_until = span.end_us;
    TimelineSpan* const last = row.bars.empty() ? nullptr : &row.bars.back();
    const bool is_near = last != nullptr && span.begin_us - last->end_us < near_us;
    const bool is_short = last != nullptr && std::min(span.end_us - span.begin_us,
                                                      last->end_us - last->begin_us) < 2 * near_us;
    const bool overlaps = last != nullptr && span.begin_us < last->end_us;
    if ((is_near && is_short) || overlaps) {
      last->end_us = span.end_us;
      ++num_joined;
      continue;
    }
    if (last != nullptr) name_joined();
    num_joined = 1;
    row.bars.push_back(span);
  }
  name_joined();
  return row;
}

std::string milliseconds(double us) {
  return formatted(us >= 99950 ? "%.0f ms" : us >= 9995 ? "%.1f ms" : "%.2f ms", us / 1000);
}

std::string row_html(const TimelineRow& row, const TimeExtent& extent) {
  const double scale = kTimelineWidth / (extent.end - extent.begin);
  std::string html = concat("<div class=\"row\"><span class=\"name\">", html_text(row.name),
                            "</span><svg viewBox=\"0 0 ", kTimelineWidth,
                            " 10\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
                            html_text(row.name), ": busy for ", milliseconds(row.busy_us),
                            "\" class=\"row-", std::min<size_t>(order_of(row.name), 4), "\">");
  for (const TimelineSpan& bar : row.bars) {
    // Leaves a hair between neighbours.
    const double width = std::max(0.6, (bar.end_us - bar.begin_us) * scale - 0.4);
    html += concat("<rect x=\"", formatted("%.1f", (bar.begin_us - extent.begin) * scale),
                   "\" y=\"0\" width=\"", formatted("%.1f", width), "\" height=\"10\"><title>",
                   html_text(bar.label), ", ", milliseconds(bar.end_us - bar.begin_us),
                   "</title></rect>");
  }
  const double share = 100 * row.busy_us / (extent.end - extent.begin);
  return html + concat("</svg><span class=\"busy\">", milliseconds(row.busy_us), " <small>",
                       formatted("%.0f", share), " %</small></span></div>");
}

}  // namespace

std::vector<TimelineRow> timeline_rows(std::span<const TimelineSpan> spans) {
  const TimeExtent extent = extent_of(spans);
  std::vector<std::string> names;
  for (const TimelineSpan& span : spans)
    if (std::find(names.begin(), names.end(), span.row) == names.end()) names.push_back(span.row);
  std::stable_sort(names.begin(), names.end(), [](const std::string& a, const std::string& b) {
    return order_of(a) < order_of(b);
  });
  std::vector<TimelineRow> rows;
  for (const std::string& name : names) {
    std::vector<TimelineSpan> of_row;
    for (const TimelineSpan& span : spans)
      if (span.row == name) of_row.push_back(span);
    rows.push_back(joined(std::move(of_row), (extent.end - extent.begin) * kNear / kTimelineWidth));
  }
  return rows;
}

std::string timeline_chart_html(std::span<const TimelineSpan> spans) {
  const TimeExtent extent = extent_of(spans);
  if (!(extent.end > extent.begin)) return "";
  std::string html =
      "<section class=\"card wide\" id=\"timeline\"><header><h2>Timeline of one step</h2>";
  html += concat("<span class=\"unit\">", milliseconds(extent.end - extent.begin),
                 "</span></header>", "<div class=\"timeline\">");
  for (const TimelineRow& row : timeline_rows(spans)) html += row_html(row, extent);
  html += "<div class=\"xlabels\" aria-hidden=\"true\">";
  const ChartAxis axis(0, (extent.end - extent.begin) / 1000, ChartAxis::Scale::kLinear);
  for (const AxisTick& tick : axis.ticks())
    html += concat("<span style=\"left:", formatted("%.2f", 100 * axis.position(tick.value)),
                   "%\">", tick.label, "</span>");
  return html +
         "</div></div><p class=\"note\">Rows run beside each other. A bar's name and time appear "
         "when "
         "the pointer rests on it.</p></section>\n";
}

}  // namespace fsdp::train
