// What a person sees of a run: changed settings and memory at its start, a line per step, a bar
// with the time that is left, and how it ended.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>

#include "fsdp/train/log/console_tables.h"
#include "fsdp/train/log/run_records.h"

namespace fsdp::train {

struct ConsoleOptions {
  // Nothing is printed.
  bool is_quiet = false;
  // A bar below the lines, redrawn with each step. Needs a terminal that can wipe a line.
  bool has_bar = false;
  bool has_colors = false;
  // Prints a line for multiples of this, for the first and the last step, and for steps with a
  // remark; 0: as often as max_lines allows.
  int64_t log_every = 0;
  // About as many lines for steps at most, where log_every is 0.
  int64_t max_lines = 300;
  // Characters of a line, asked for each line since windows change; empty: 100.
  std::function<int64_t()> width = {};
  // Seconds on any clock that only goes forward; empty: the steady one.
  std::function<double()> now = {};
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
