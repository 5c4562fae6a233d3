// All watchers together, as the trainer uses them, over a run that is interrupted and resumed.
#include "fsdp/train/run_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "fsdp/base/text.h"
#include "support/temp_dir.h"

namespace fsdp::train::run_watch_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

WatchOptions options_in(const testing::TempDir& dir) {
  return {.log_path = dir / "log.jsonl",
          .tensorboard_dir = dir / "events",
          .report_path = dir / "report.html"};
}

StepRecord step_record(int64_t step) {
  return {
      .step = step, .total_steps = 60, .loss = 3 + 0.1 * std::sin(7.0 * static_cast<double>(step))};
}

TEST(RunWatch, ShowsTheSameRunEverywhere) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  std::ostringstream out;
  {
    RunWatch watch(options_in(dir),
                   {.title = "a title", .settings = {{"g", "lr", "0.1", true, ""}}}, out);
    for (int64_t step = 1; step <= 50; ++step) watch.step(step_record(step));
    StepRecord spike = step_record(51);
    spike.loss = 30;
    watch.step(spike);
    watch.validation({.step = 51, .loss = 2.5});
    watch.validation({.step = 52, .loss = 2.75});
    watch.memory({{"weights", 100, 90, false}});
    watch.timeline({{"compute", 0, 10, "op"}});
    watch.sample({.step = 52, .prompt = "hello ", .continuation = "world"});
    watch.checkpoint({.step = 52, .path = "runs/step_52"});
    watch.end({.step = 52, .num_steps = 52, .seconds = 5, .stopped_by = "SIGINT"});
  }
  EXPECT_THAT(out.str(), HasSubstr("a title"));
  EXPECT_THAT(out.str(), HasSubstr("lr 0.1\n"));
  EXPECT_THAT(out.str(), HasSubstr("loss z +"));
  EXPECT_THAT(out.str(), HasSubstr("validation after step 52: loss 2.7500  (best 2.5000)"));
  EXPECT_THAT(out.str(), HasSubstr("trained 52 steps in 5 s, stopped by SIGINT after step 52; "
                                   "best validation loss 2.5000 at step 51"));
  const std::string page = read_text_file(dir / "report.html", 1 << 20);
  for (const char* const part :
       {"\"title\":\"a title\"", "\"measured\":90", "[0.0,0.01,\"op\"]", "hello ", "runs/step_52",
        "\"num_outliers\":1", "\"stopped_by\":\"SIGINT\""})
    EXPECT_THAT(page, HasSubstr(part));
  EXPECT_EQ(names_in(dir / "events").size(), 1);
}

TEST(RunWatch, GoesOnWhereAnInterruptedRunWas) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  std::ostringstream out;
  {
    RunWatch watch(options_in(dir), {}, out);
    for (int64_t step = 1; step <= 40; ++step) watch.step(step_record(step));
    watch.validation({.step = 20, .loss = 1.5});
    watch.validation({.step = 40, .loss = 0.5});  // of steps that are lost
  }
  RunWatch watch(options_in(dir), {.resumed_step = 30}, out);
  watch.step(step_record(31));
  StepRecord spike = step_record(32);
  spike.loss = 30;
  watch.step(spike);  // what is usual is known from before
  watch.end({.step = 32, .num_steps = 2, .seconds = 1});
  const std::string log = read_text_file(dir / "log.jsonl", 1 << 20);
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1 + 30 + 1 + 1 + 2 + 1);
  EXPECT_THAT(out.str(), HasSubstr("resumed after step 30"));
  EXPECT_THAT(out.str(), HasSubstr("best validation loss 1.5000 at step 20"));
  EXPECT_THAT(out.str(), HasSubstr("loss z +"));
  const std::string page = read_text_file(dir / "report.html", 1 << 20);
  EXPECT_THAT(page, HasSubstr("{\"loss\":{\"x\":[1.0,2.0,3.0,"));
  EXPECT_THAT(page, HasSubstr("\"resumed\":[30]"));
}

TEST(RunWatch, WritesNoFileThatIsNotAskedFor) {
  const testing::TempDir dir;
  std::ostringstream out;
  RunWatch watch({}, {}, out);
  watch.step(step_record(1));
  watch.end({.step = 1, .num_steps = 1, .seconds = 1});
  EXPECT_THAT(out.str(), Not(HasSubstr("report")));
  EXPECT_TRUE(names_in(dir.path()).empty());
}

}  // namespace
}  // namespace fsdp::train::run_watch_test
