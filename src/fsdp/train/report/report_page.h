// A run as one HTML page that needs no network and no other file (curves, memory, timeline,
// settings), and the file that holds the current page while the run goes on.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

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

  const std::string& path() const { return path_; }

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

// Views of everything the page is made from.
struct ReportContent {
  const RunFacts& facts;
  const RunHistory& history;
  std::span<const TimelineSpan> timeline;
  // nullptr: none yet.
  const TextSample* sample = nullptr;
  // Seconds since 1970, for "as of".
  double time = 0;
  // Written by the run itself, so that a page without an end is one of a run that goes on.
  bool is_live = true;
};

// Leaves out sections that have no content yet. Takes some hundred kilobytes at most, for any
// number of steps. While the run goes on, the page reloads itself from time to time.
std::string report_page(const ReportContent& content);

}  // namespace fsdp::train
