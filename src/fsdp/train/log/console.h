// A run as a person sees it: changed settings and memory at its start, a line per step, a bar
// with the time that is left, and how it ended.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

// --- steps ---------------------------------------------------------------------------------------

struct StepColumn;

// The columns of the lines: those the run has figures for, as many as fit.
struct StepColumns {
  int64_t step_chars = 1;  // digits of the last step
  std::vector<const StepColumn*> shown = {};

  // For a run whose first step is `first`, in lines of `width` characters.
  static StepColumns of(const StepRecord& first, int64_t width);

  int64_t width() const { return static_cast<int64_t>(header().size()); }
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

// A model's text with four blanks before each line, so that nobody takes it for lines of the run.
std::string indented(std::string_view text);

// --- at the start --------------------------------------------------------------------------------

// A few lines, so that the first step is on the same screen: the title, settings that are not the
// default, and the forecast.
std::string start_text(const RunFacts& facts, int64_t width);

// Every setting in a line of its own, by group, and the forecast, for --check.
std::string start_tables(const RunFacts& facts, int64_t width);

// --- the console ---------------------------------------------------------------------------------

struct ConsoleOptions {
  bool is_quiet = false;  // prints nothing
  bool has_bar = false;   // below the lines, for a terminal that can wipe a line
  bool has_colors = false;
  // Prints a line for multiples of this, for the first and the last step, and for steps with a
  // remark; 0: as often as max_lines allows.
  int64_t log_every = 0;
  int64_t max_lines = 300;  // for steps, about, where log_every is 0
  // Characters of a line, asked for each line since windows change; empty: 100.
  std::function<int64_t()> width = {};
  std::function<double()> now = {};  // seconds on a clock that only goes forward; empty: steady
};

// For what standard output and the environment (TERM, NO_COLOR) allow.
ConsoleOptions console_options_for_stdout();

// Prints to one stream. For one thread at a time.
class Console {
 public:
  Console(ConsoleOptions options, std::ostream& out);
  // Wipes the bar.
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // Changed settings, and the forecast of memory where there is one.
  void begin(const RunFacts& facts);

  void step(const StepRecord& record);
  // `best` is the lowest validation loss before this one; infinite: there was none.
  void validation(const ValidationRecord& record, double best);
  void checkpoint(const CheckpointRecord& record);
  void sample(const TextSample& sample);
  void end(const EndRecord& record, const std::optional<ValidationRecord>& best,
           const std::string& report_path);

  // A line of any other kind, above the bar.
  void note(std::string_view text);

 private:
  bool is_due(const StepRecord& record) const;
  void print_line(std::string_view line, std::string_view color = {});
  void draw_bar();
  void wipe_bar();

  ConsoleOptions options_;
  std::ostream& out_;
  StepColumns columns_;
  int64_t num_lines_since_header_ = -1;  // -1: none was printed
  bool was_special_ = false;             // the last step had a remark
  int64_t first_step_ = 0;               // of this process; 0: none yet
  double first_step_at_ = 0;
  int64_t last_step_ = 0;
  int64_t total_steps_ = 0;  // 0: no bar, before and after the steps
  double bar_drawn_at_ = 0;
  bool is_bar_shown_ = false;
};

}  // namespace fsdp::train
