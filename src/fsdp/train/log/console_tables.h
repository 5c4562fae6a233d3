// The texts that a console shows: settings and memory at the start of a run, in some lines or in
// tables, then a line of aligned columns per step.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- steps ---------------------------------------------------------------------------------------

// The columns of the lines: those the run has figures for, as many as fit.
struct StepColumns {
  // Digits of the last step.
  int64_t step_chars = 1;
  bool has_teraflops = false;
  bool has_mfu = false;
  bool has_peak = true;

  // For a run whose first step is `first`, in lines of `width` characters.
  static StepColumns of(const StepRecord& first, int64_t width);

  int64_t width() const;
  std::string header() const;
  std::string line(const StepRecord& record) const;
};

// Why the step is special: "loss z +5.1", "skipped: ..."; "" for an ordinary one.
std::string step_remark(const StepRecord& record);

// "12 ms", "4.5 s", "45 s", "1 min 52 s", "3 h 20 min".
std::string duration_text(double seconds);

// " 41 % [########------------]  123/300  1 min 12 s left", in `width` characters at most.
// Negative `seconds_left`: unknown.
std::string progress_bar(int64_t done, int64_t total, double seconds_left, int64_t width);

// --- at the start --------------------------------------------------------------------------------

// A few lines, so that the first step is on the same screen: the title, settings that are not the
// default, and the forecast.
std::string start_text(const RunFacts& facts, int64_t width);

// The same as tables with every setting, for --check.
std::string start_tables(const RunFacts& facts, int64_t width);

// Settings by group, in as many columns as fit `width` characters; changed ones have a `*` before
// their name. "" without settings.
std::string settings_table(std::span<const SettingRow> settings, int64_t width);

// Forecast per kind on the fullest rank, with a total per place. "" where nothing is forecast.
std::string forecast_table(std::span<const MemoryRow> memory);

}  // namespace fsdp::train
