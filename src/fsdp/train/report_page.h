// A run as one HTML page: curves, memory, timeline, settings. It needs no network and no other
// file.
#pragma once

#include <span>
#include <string>

#include "fsdp/train/run_facts.h"
#include "fsdp/train/run_history.h"

namespace fsdp::train {

// What the page is made from; views of what others own.
struct ReportContent {
  const RunFacts& facts;
  const RunHistory& history;
  std::span<const TimelineSpan> timeline;
  // nullptr: none yet.
  const TextSample* sample = nullptr;
  // Seconds since 1970, for "as of".
  double time = 0;
};

// Sections for which there is nothing yet are left out. Some hundred kilobytes at most, whatever
// the number of steps. While the run goes on, the page loads itself again from time to time.
std::string report_page(const ReportContent& content);

}  // namespace fsdp::train
