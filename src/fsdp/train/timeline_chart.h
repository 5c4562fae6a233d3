// One step as rows of bars over time: what ran beside what.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "fsdp/train/run_facts.h"

namespace fsdp::train {

// One row of the drawing, with what is too narrow to be seen joined to its neighbours.
struct TimelineRow {
  std::string name;
  double busy_us = 0;  // spans that overlap count once
  std::vector<TimelineSpan> bars;
};

// Rows in the order compute, gather, reduce, update, others; no bars of a row overlap, and no more
// than some hundreds are in it.
std::vector<TimelineRow> timeline_rows(std::span<const TimelineSpan> spans);

// "" without spans.
std::string timeline_chart_html(std::span<const TimelineSpan> spans);

}  // namespace fsdp::train
