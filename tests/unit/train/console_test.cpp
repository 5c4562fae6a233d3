// The console's output, to the letter: on a terminal, in a file, and with --quiet.
#include "fsdp/train/log/console.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "fsdp/base/text.h"

namespace fsdp::train::console_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

StepRecord step_record(int64_t step, int64_t total) {
  return {.step = step,
          .total_steps = total,
          .loss = 5.63124,
          .loss_z = 0,
          .learning_rate = 3e-4,
          .gradient_norm = 1.2345,
          .milliseconds = 412.31,
          .tokens_per_second = 19882.4,
          .teraflops = 0,
          .mfu = 0,
          .peak_bytes = 40 << 20,
          .tokens = 0,
          .is_skipped = false,
          .terms = {}};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// The final text of a terminal, for output that moves within one line: \r and "wipe the rest".
std::vector<std::string> screen_of(const std::string& text) {
  std::vector<std::string> screen(1);
  size_t column = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.compare(i, 3, "\x1b[K") == 0) {
      screen.back().resize(std::min(column, screen.back().size()));
      i += 2;
    } else if (text[i] == '\r') {
      column = 0;
    } else if (text[i] == '\n') {
      screen.emplace_back();
      column = 0;
    } else {
      screen.back().resize(std::max(screen.back().size(), column + 1), ' ');
      screen.back()[column++] = text[i];
    }
  }
  return screen;
}

TEST(StepLine, AlignsItsColumnsWithTheirNames) {
  StepRecord record = step_record(7, 300);
  record.teraflops = 1.25;
  record.mfu = 0.413;
  const StepColumns columns = StepColumns::of(record, 120);
  EXPECT_EQ(
      columns.header(),
      "   step       loss  grad norm         lr        ms    tokens/s  TFLOP/s     MFU       peak");
  EXPECT_EQ(
      columns.line(record),
      "  7/300     5.6312      1.234   3.00e-04     412.3      19,882     1.25  41.3 %   40.0 MiB");
  // There are none for what is unknown.
  EXPECT_EQ(StepColumns::of(step_record(1, 9), 120).header(),
            "step       loss  grad norm         lr        ms    tokens/s       peak");
}

TEST(StepLine, LeavesOutColumnsThatDoNotFit) {
  StepRecord record = step_record(1, 300);
  record.teraflops = 1.25;
  record.mfu = 0.4;
  for (const int64_t width : {90, 80, 70, 66})
    EXPECT_LE(StepColumns::of(record, width).width(), width);
  EXPECT_THAT(StepColumns::of(record, 85).header(), HasSubstr("MFU"));
  // The loss is always there.
  EXPECT_THAT(StepColumns::of(record, 10).header(), HasSubstr("loss"));
}

TEST(StepLine, StaysAlignedForFiguresOfAnySize) {
  StepRecord record = step_record(300, 300);
  const StepColumns columns = StepColumns::of(record, 120);
  for (const double value : {0.0, 1e-9, 0.05, 123.4, 123456.7, 1e30, kInfinity, -kInfinity,
                             std::numeric_limits<double>::quiet_NaN()}) {
    record.loss = record.gradient_norm = value;
    EXPECT_EQ(static_cast<int64_t>(columns.line(record).size()), columns.width()) << value;
  }
}

TEST(Duration, IsSaidAsAPersonWould) {
  EXPECT_EQ(duration_text(0.0004), "0 ms");
  EXPECT_EQ(duration_text(0.0124), "12 ms");
  EXPECT_EQ(duration_text(0.9996), "1.0 s");
  EXPECT_EQ(duration_text(5), "5 s");
  EXPECT_EQ(duration_text(9.94), "9.9 s");
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(59.6), "1 min 0 s");
  EXPECT_EQ(duration_text(112), "1 min 52 s");
  EXPECT_EQ(duration_text(12000), "3 h 20 min");
  EXPECT_EQ(duration_text(400000), "4 d 15 h");
  EXPECT_EQ(duration_text(std::numeric_limits<double>::quiet_NaN()), "years");
}

TEST(ProgressBar, FitsAnyWidth) {
  EXPECT_EQ(progress_bar(30, 300, 72, 50), " 10 % [#----------------]  30/300  1 min 12 s left");
  EXPECT_EQ(progress_bar(30, 300, -1, 20), " 10 %  30/300");
  for (int64_t width = 0; width < 120; ++width)
    for (const int64_t done : {0, 1, 299, 300, 301})
      EXPECT_LE(static_cast<int64_t>(progress_bar(done, 300, 1e6, width).size()), width);
}

TEST(StartText, ShowsChangedSettingsAndTheForecastInAFewLines) {
  RunFacts facts{.title = "tiny: 1.7 M parameters in 6 units on 2 ranks",
                 .settings = {{"data", "data", "docs", true, ""},
                              {"data", "batch", "8", false, ""},
                              {"length", "steps", "20", true, ""}},
                 .memory = {{"weights", 1 << 20, kUnknownBytes, false},
                            {"main weights", 0, kUnknownBytes, false},
                            {"offloaded", 2 << 20, kUnknownBytes, true}}};
  EXPECT_EQ(start_text(facts, 100),
            "tiny: 1.7 M parameters in 6 units on 2 ranks\n"
            "settings changed (--print-config shows all): data docs, steps 20\n"
            "memory per rank (forecast): 1024 KiB and 2048 KiB on the host = weights 1024 KiB,\n"
            "  offloaded 2048 KiB\n");
  // Nothing to say of a run with defaults alone, and where it goes on.
  EXPECT_EQ(start_text({.resumed_step = 7}, 100), "resumed after step 7\n");
  // However many settings are changed, the first step is on the same screen.
  facts.settings.assign(70, {"data", "validation-fraction", std::string(500, 'x'), true, ""});
  for (const std::string& line : lines_of(start_text(facts, 100))) EXPECT_LE(line.size(), 100);
  facts.settings.assign(40, {"data", "validation-batches", "16", true, ""});
  EXPECT_LE(lines_of(start_text(facts, 100)).size(), 15);
}

TEST(StartTables, ShowEverySettingAndTheForecast) {
  const RunFacts facts{.beginning = "training random weights",
                       .title = "tiny",
                       .settings = {{"model", "model", "tiny", false, ""},
                                    {"model", "sequence", "256", true, ""},
                                    {"training", "lr", "0.001", true, ""}},
                       .memory = {{"weights", 1 << 20, kUnknownBytes, false},
                                  {"activations", kUnknownBytes, kUnknownBytes, false}}};
  EXPECT_EQ(start_tables(facts, 100),
            "training random weights\ntiny\n\nsettings (* changed from the default)\n"
            "  model       model     tiny\n"
            "            * sequence  256\n"
            "  training  * lr        0.001\n"
            "\nmemory per rank (forecast): 1024 KiB = weights 1024 KiB\n");
}

TEST(Console, PrintsPlainLinesIntoAFile) {
  std::ostringstream out;
  {
    Console console({}, out);
    for (int64_t step = 1; step <= 3; ++step) console.step(step_record(step, 3));
    console.validation({.step = 3, .loss = 2.5}, kInfinity);
    console.checkpoint({.step = 3,
                        .path = "runs/x/step_3",
                        .bytes = 40 << 20,
                        .blocked_milliseconds = 12,
                        .milliseconds = 900});
    console.end({.step = 3, .num_steps = 3, .seconds = 112, .stopped_by = ""},
                ValidationRecord{.step = 3, .loss = 2.5}, "runs/x/report.html");
  }
  EXPECT_THAT(out.str(), Not(HasSubstr("\x1b")));
  EXPECT_THAT(out.str(), Not(HasSubstr("\r")));
  EXPECT_THAT(
      lines_of(out.str()),
      ElementsAre(HasSubstr("step       loss"), HasSubstr(" 1/3 "), HasSubstr(" 2/3 "),
                  HasSubstr(" 3/3 "), "validation after step 3: loss 2.5000",
                  "checkpoint of step 3: runs/x/step_3, 40.0 MiB in 900 ms (training waited 12 ms)",
                  "trained 3 steps in 1 min 52 s; best validation loss 2.5000 at step 3; "
                  "report runs/x/report.html"));
}

TEST(Console, SaysNothingWhenQuiet) {
  std::ostringstream out;
  {
    Console console({.is_quiet = true, .has_bar = true}, out);
    console.begin({.title = "x", .settings = {{"a", "b", "c", true, ""}}});
    console.step(step_record(1, 3));
    console.validation({.step = 1, .loss = 2.5}, kInfinity);
    console.checkpoint({});
    console.sample({});
    console.note("x");
    console.end({}, std::nullopt, "");
  }
  EXPECT_EQ(out.str(), "");
}

TEST(Console, ThinsOutTheLinesOfLongRuns) {
  const auto num_lines = [](int64_t total, int64_t every, int64_t max_lines = 300) {
    std::ostringstream out;
    Console console({.log_every = every, .max_lines = max_lines}, out);
    for (int64_t step = 1; step <= total; ++step) console.step(step_record(step, total));
    return lines_of(out.str()).size() - 1;  // without the header
  };
  EXPECT_EQ(num_lines(300, 0), 300);
  EXPECT_EQ(num_lines(400, 0), 201);  // 1, 2, 4, ...
  EXPECT_EQ(num_lines(10000, 0), 201);
  EXPECT_EQ(num_lines(100, 30), 5);  // 1, 30, 60, 90, 100
  EXPECT_EQ(num_lines(1000, 1), 1000);
  EXPECT_EQ(num_lines(250, 0, 30), 26);  // 1, 10, 20, ...
}

TEST(Console, ShowsAnOutlierWhereverItIs) {
  std::ostringstream out;
  Console console({.has_colors = true, .log_every = 100}, out);
  for (int64_t step = 1; step <= 20; ++step) {
    StepRecord record = step_record(step, 1000);
    if (step == 7) record.loss_z = 5.12;
    if (step == 9) record.loss_z = 3.9;
    if (step >= 12) record.is_skipped = true;
    console.step(record);
  }
  const std::vector<std::string> lines = lines_of(out.str());
  ASSERT_EQ(lines.size(), 4);  // the header, 1, 7 and 12, the first of those that are skipped
  EXPECT_THAT(lines[2], HasSubstr("\x1b[33m"));
  EXPECT_THAT(lines[2], HasSubstr(" 7/1000 "));
  EXPECT_THAT(lines[2], HasSubstr("  loss z +5.1"));
  EXPECT_THAT(lines[3], HasSubstr("  skipped: gradients are not finite"));
}

TEST(Console, KeepsABarBelowTheLinesAndWipesItInTheEnd) {
  std::ostringstream out;
  double now = 100;
  {
    Console console({.has_bar = true, .width = [] { return 80; }, .now = [&] { return now; }}, out);
    for (int64_t step = 1; step <= 150; ++step, now += 2) console.step(step_record(step, 300));
    std::vector<std::string> screen = screen_of(out.str());
    // 149 steps of 2 s are timed, and 150 are left.
    EXPECT_EQ(screen.back(), " 50 % [" + std::string(20, '#') + std::string(20, '-') +
                                 "]  150/300  5 min 0 s left");
    EXPECT_THAT(screen[screen.size() - 2], HasSubstr("150/300     5.6312"));

    console.note("hello");
    screen = screen_of(out.str());
    EXPECT_EQ(screen[screen.size() - 2], "hello");
    EXPECT_THAT(screen.back(), HasSubstr(" 50 % ["));
  }
  const std::vector<std::string> screen = screen_of(out.str());
  EXPECT_EQ(screen.back(), "");
  for (const std::string& line : screen) EXPECT_THAT(line, Not(HasSubstr("#")));
  // A terminal has its header again after every 40 lines.
  EXPECT_EQ(
      std::count_if(screen.begin(), screen.end(),
                    [](const std::string& line) { return line.find("loss  grad") != line.npos; }),
      4);
}

TEST(Console, DoesNotDrawTheBarAtEveryStepOfAFastRun) {
  std::ostringstream out;
  double now = 100;
  Console console({.has_bar = true, .log_every = 100000, .now = [&] { return now; }}, out);
  for (int64_t step = 1; step <= 1000; ++step, now += 0.001)
    console.step(step_record(step, 100000));
  const std::string text = out.str();
  EXPECT_LE(std::count(text.begin(), text.end(), '%'), 12);  // 1 s, ten times a second
}

TEST(Console, LetsNoControlCharacterOfASampleReachTheTerminal) {
  std::ostringstream out;
  Console({}, out).sample({.step = 5, .prompt = "Once\n", .continuation = "\x1b[2J\x07 \xc3\xa9"});
  EXPECT_EQ(out.str(),
            "sample after step 5:\n    Once\n    \xef\xbf\xbd[2J\xef\xbf\xbd \xc3\xa9\n");
}

}  // namespace
}  // namespace fsdp::train::console_test
