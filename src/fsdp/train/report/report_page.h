// Runs as one HTML page that needs no network and no other file (curves, memory, timeline,
// settings), and the file that holds the current page while a run goes on. The page is page.html,
// whose script draws everything from the JSON that is made here.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "fsdp/train/log/run_history.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- the file ------------------------------------------------------------------------------------

// Throws an Error if there is something else than a file: writing replaces the path, so that a
// device such as /dev/null would be gone. `option` is the flag that chooses another one.
void check_replaceable(const std::string& path, const std::string& what, const std::string& option);

// For one thread at a time.
class ReportFile {
 public:
  // `option` is the flag that chooses another path; `now` gives seconds on a clock that only goes
  // forward; empty: the steady one.
  explicit ReportFile(std::string path, const std::string& option = "--report",
                      std::function<double()> now = {});

  // Whether it is time for the next page: after at least 5 s, and after 99 times as long as the
  // last page took, so that all pages together take a hundredth of the run.
  bool is_due() const;

  // Makes the page and replaces the file in one go, so that readers find a whole page. A failure is
  // an Error the first time, later a warning, once.
  void write(const std::function<std::string()>& page);

 private:
  std::string path_;
  std::function<double()> now_;
  double next_at_ = 0;
  bool was_written_ = false;
  bool is_failing_ = false;
};

// --- the page ------------------------------------------------------------------------------------

// Views of everything the page of a run is made from.
struct ReportContent {
  const RunFacts& facts;
  const RunHistory& history;
  std::span<const TimelineSpan> timeline;
  // nullptr: none yet.
  const TextSample* sample = nullptr;
  // Written by the run itself, so that a page without an end is one of a run that goes on, and
  // loads itself again from time to time.
  bool is_live = true;
};

// Takes some hundred kilobytes at most, for any number of steps.
std::string report_page(const ReportContent& content);

// Colours and dashes tell so many apart.
inline constexpr size_t kMaxComparedRuns = 16;

// Several runs: curves in one chart, figures and settings side by side. One is a report.
std::string comparison_page(std::span<const LoggedRun> runs);

// One step as rows of bars over time, under a title.
std::string timeline_page(const std::string& title, std::span<const TimelineSpan> spans);

}  // namespace fsdp::train
