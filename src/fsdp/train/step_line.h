// A step as one line of aligned columns.
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/train/step_record.h"

namespace fsdp::train {

// Which columns there are: those the run has figures for, as many as fit.
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

// What sets the step apart: "loss z +5.1", "skipped: ..."; "" for nothing.
std::string step_remark(const StepRecord& record);

// "12 ms", "4.5 s", "45 s", "1 min 52 s", "3 h 20 min".
std::string duration_text(double seconds);

// " 41 % [########------------]  123/300  1 min 12 s left", in `width` characters at most.
// Negative `seconds_left`: unknown.
std::string progress_bar(int64_t done, int64_t total, double seconds_left, int64_t width);

}  // namespace fsdp::train
