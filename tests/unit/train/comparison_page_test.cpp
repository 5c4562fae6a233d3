// Runs read from their logs, and several of them on one page.
#include "fsdp/train/report/comparison_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/train/log/json_log.h"
#include "support/error_of.h"
#include "support/temp_dir.h"

namespace fsdp::train::comparison_page_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

RunFacts facts_of(const std::string& rate) {
  return {.title = "a title",
          .settings = {{"optimizer", "lr", rate, rate != "0.004", ""},
                       {"data", "batch", "8", true, ""},
                       {"output", "log", concat("/", rate, "/log.jsonl"), false, ""},
                       {"", "of-another-version", "1", false, ""}},
          .environment = {{"host", rate}, {"libtorch", "2.13.0"}}};
}

std::string step_line(int64_t step, double loss) {
  return log_line_of(StepRecord{.step = step,
                                .total_steps = 100,
                                .loss = loss,
                                .tokens_per_second = 1000,
                                .peak_bytes = 1 << 20,
                                .tokens = 4096 * step},
                     0);
}

// A run of so many steps in DIR/name/log.jsonl.
std::string write_run(const testing::TempDir& dir, const std::string& name, int64_t num_steps,
                      const std::string& rate, const std::string& rest = "") {
  std::string text = run_line(facts_of(rate), 0) + "\n";
  for (int64_t step = 1; step <= num_steps; ++step) text += step_line(step, 2.5) + "\n";
  make_directories(dir / name);
  write_file_durably(dir / name + "/log.jsonl", text + rest);
  return dir / name;
}

TEST(LoggedRun, HasFactsAndHistoryOfItsLog) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::string path = write_run(
      dir, "a", 5, "0.1",
      log_line_of(EndRecord{.step = 5, .num_steps = 5, .seconds = 3, .stopped_by = "SIGINT"}, 0) +
          "\n");
  for (const std::string& given : {path, path + "/", path + "/log.jsonl"}) {
    const LoggedRun run = read_logged_run(given);
    EXPECT_EQ(run.name, given == path + "/" ? path : given);
    EXPECT_EQ(run.facts.title, "a title");
    EXPECT_EQ(run.history.loss().buckets().size(), 5);
    EXPECT_EQ(run.history.end()->stopped_by, "SIGINT");
    // In the order of the table of settings, with its groups.
    std::vector<std::string> rows;
    for (const SettingRow& row : run.facts.settings)
      rows.push_back(concat(row.group, " ", row.name, " ", row.value, row.is_changed ? " *" : ""));
    EXPECT_THAT(rows, ElementsAre("data batch 8 *", "optimizer lr 0.1 *",
                                  "output log /0.1/log.jsonl", "others of-another-version 1"));
    EXPECT_EQ(run.facts.environment.size(), 2);
  }
}

TEST(LoggedRun, PassesOverHalfLinesAndStepsThatWereDoneAgain) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  RunFacts resumed = facts_of("0.2");
  resumed.resumed_step = 3;
  // A run that crashed at step 6, was resumed after step 3 elsewhere, and is being written.
  const std::string rest = concat("{\"kind\":\"st\n", "\n", "{\"kind\":\"unheard\",\"step\":4}\n",
                                  run_line(resumed, 0), "\n", step_line(4, 1.5), "\n",
                                  step_line(5, 1.25), "\n", step_line(6, 1).substr(0, 30));
  const LoggedRun run = read_logged_run(write_run(dir, "a", 6, "0.1", rest));
  std::vector<double> losses;
  for (const SeriesBucket& bucket : run.history.loss().buckets()) losses.push_back(bucket.mean());
  EXPECT_THAT(losses, ElementsAre(2.5, 2.5, 2.5, 1.5, 1.25));
  EXPECT_THAT(run.history.resumed_steps(), ElementsAre(3));
  EXPECT_FALSE(run.history.end());
  EXPECT_EQ(run.facts.settings[1].value, "0.2");
}

TEST(LoggedRun, SaysWhatALogLacks) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  make_directories(dir / "empty");
  const auto error = [](const std::string& path) {
    return testing::error_of<Error>([&] { read_logged_run(path); });
  };
  EXPECT_THAT(error(dir / "empty"), HasSubstr("empty/log.jsonl: there is no log; give"));
  EXPECT_THAT(error(dir / "nothing"), HasSubstr("nothing: there is no log; give"));
  EXPECT_THAT(error(write_run(dir, "early", 0, "0.1")), HasSubstr("has no step of a run; wait"));
}

TEST(ComparisonPage, ShowsEachRunAndWhatDiffers) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::vector<LoggedRun> runs = {
      read_logged_run(write_run(dir, "one", 60, "0.004")),
      read_logged_run(write_run(dir, "two<b>\\", 30, "0.1")),
      read_logged_run(
          write_run(dir, "three", 10, "0.1",
                    log_line_of(ValidationRecord{.step = 10, .loss = 1.75}, 0) + "\n"))};
  const std::string page = comparison_page(runs, 0);
  EXPECT_THAT(page, HasSubstr("<h1>3 runs</h1>"));
  EXPECT_THAT(page,
              HasSubstr("<td class=\"number\">60 of 100</td><td class=\"number\">245,760</td>"));
  EXPECT_THAT(page, HasSubstr("1.75 <small>step 10</small>"));
  // Each has its colour in charts and tables.
  for (const char* const look : {"main c0", "main c1", "main c2"})
    EXPECT_THAT(page, HasSubstr(concat("class=\"", look, "\"")));
  // One value of three is another; equal ones and those nobody chose are left out.
  EXPECT_THAT(page, HasSubstr("<th scope=\"row\">lr</th><td>0.004</td><td>0.1</td><td>0.1</td>"));
  EXPECT_THAT(page, Not(HasSubstr("<th scope=\"row\">batch")));
  EXPECT_THAT(page, Not(HasSubstr("<th scope=\"row\">log")));
  EXPECT_THAT(page, HasSubstr("<th scope=\"row\">host</th>"));
  EXPECT_THAT(page, Not(HasSubstr("<th scope=\"row\">libtorch")));
  // Names are text, in markup and in the figures for the script.
  EXPECT_THAT(page, Not(HasSubstr("two<b>")));
  EXPECT_THAT(page, HasSubstr("two&lt;b&gt;\\\\\","));
  EXPECT_THAT(page, Not(HasSubstr("http-equiv=\"refresh\"")));
  // Two points tell the tokens of every step.
  EXPECT_THAT(page, HasSubstr("\"tokens\":[[1,4096],[60,245760]]"));
}

TEST(ComparisonPage, TellsManyRunsApart) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  std::vector<LoggedRun> runs;
  for (size_t i = 0; i < kMaxComparedRuns; ++i)
    runs.push_back(read_logged_run(write_run(dir, concat("run-", i), 3, "0.1")));
  const std::string page = comparison_page(runs, 0);
  EXPECT_THAT(page, HasSubstr("class=\"main c7\""));
  EXPECT_THAT(page, HasSubstr("class=\"main c7 again\""));
}

}  // namespace
}  // namespace fsdp::train::comparison_page_test
