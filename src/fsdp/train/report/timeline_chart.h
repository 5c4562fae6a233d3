// One step as rows of bars over time, which show the work that ran at the same time.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// One row of the drawing; bars too narrow to be seen are joined to their neighbours.
struct TimelineRow {
  std::string name;
  double busy_us = 0;  // spans that overlap count once
  std::vector<TimelineSpan> bars;
};

// Rows in the order compute, gather, reduce, update, others. A row has some hundred bars at most,
// and they do not overlap.
std::vector<TimelineRow> timeline_rows(std::span<const TimelineSpan> spans);

// "" without spans.
std::string timeline_chart_html(std::span<const TimelineSpan> spans);

}  // namespace fsdp::train
