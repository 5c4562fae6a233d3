// The figures that a report's page draws; tests/processes/report_test.py has a browser draw them.
#include "fsdp/train/report/report_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "fsdp/base/error.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"

namespace fsdp::train::report_page_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The data that the page's script reads.
Json figures_of(const std::string& page) {
  const std::string begin = R"(id="data">)";
  const size_t at = page.find(begin) + begin.size();
  return Json::parse(page.substr(at, page.find("</script>", at) - at));
}

Json figures_of(const RunHistory& history, const RunFacts& facts = {}) {
  return figures_of(report_page({.facts = facts, .history = history, .timeline = {}}));
}

// A run of so many steps, with some losses that are not finite.
RunHistory history_of(int64_t num_steps) {
  RunHistory history;
  history.add(RunFacts{});
  for (int64_t step = 1; step <= num_steps; ++step) {
    const double at = static_cast<double>(step);
    history.add(StepRecord{
        .step = step,
        .total_steps = num_steps,
        .loss = step % 1000 == 500 ? kNan : 2 + 3 / std::sqrt(at) + 0.1 * std::sin(at * at),
        .learning_rate = 1e-3 / at,
        .gradient_norm = 1 + std::cos(at),
        .milliseconds = 100 + std::sin(at),
        .tokens_per_second = 1e5 + 1e3 * std::sin(at),
        .tokens = 4096 * step});
    if (step % 50 == 0) history.add(ValidationRecord{.step = step, .loss = 2 + 3 / std::sqrt(at)});
    if (step % 100 == 0) history.add(CheckpointRecord{.step = step, .path = "p"});
  }
  return history;
}

TEST(ReportPage, HasTheCurvesOfARun) {
  const Json run = figures_of(history_of(60))["runs"][0];
  const Json& loss = run["series"]["loss"];
  EXPECT_EQ(loss["x"].size(), 60);
  EXPECT_EQ(loss["x"][6], 7);
  EXPECT_EQ(run["series"]["learning_rate"]["y"][3], 2.5e-4);
  EXPECT_EQ(loss["smooth"].size(), 60);
  EXPECT_FALSE(loss.contains("low")) << "each point is one step";
  EXPECT_EQ(run["series"]["validation_loss"]["x"], Json({50}));
  EXPECT_EQ(run["recent"]["last"], 60);
  // Two points tell the tokens of every step.
  EXPECT_EQ(run["tokens"], Json::parse("[[1, 4096], [60, 245760]]"));
  RunHistory few = history_of(2);
  few.add(StepRecord{.step = 3, .loss = kNan, .learning_rate = INFINITY});
  const Json series = figures_of(few)["runs"][0]["series"];
  EXPECT_FALSE(series["loss"].contains("smooth"));
  EXPECT_TRUE(series["loss"]["y"][2].is_null());
  EXPECT_TRUE(series["learning_rate"]["y"][2].is_null());
}

TEST(ReportPage, StaysSmallForLongRuns) {
  const RunHistory history = history_of(100000);
  const std::string page = report_page({.facts = {}, .history = history, .timeline = {}});
  EXPECT_LT(page.size(), 300000);
  const Json loss = figures_of(page)["runs"][0]["series"]["loss"];
  EXPECT_EQ(loss["low"].size(), loss["x"].size());
  EXPECT_LT(loss["low"][9], loss["y"][9]);
  EXPECT_GT(loss["high"][9], loss["y"][9]);
}

TEST(ReportPage, LetsNoTextEndItsFigures) {
  const std::string bad = "</script><script>alert('x')</script><!-- \xff";
  const RunFacts facts{.title = bad,
                       .settings = {{bad, bad, bad, true, bad}},
                       .environment = {{bad, bad}},
                       .memory = {{bad, 1, 1, false}}};
  RunHistory history = history_of(50);
  history.add(CheckpointRecord{.step = 50, .path = bad});
  history.add(EndRecord{.step = 50, .stopped_by = bad});
  const std::vector<TimelineSpan> timeline = {{bad, 0, 5, bad}};
  const TextSample sample{.step = 1, .prompt = bad, .continuation = bad};
  const std::string page =
      report_page({.facts = facts, .history = history, .timeline = timeline, .sample = &sample});
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  const Json figures = figures_of(page);
  const std::string shown = bad.substr(0, bad.size() - 1) + "\xef\xbf\xbd";
  EXPECT_EQ(figures["title"], shown);
  EXPECT_EQ(figures["sample"]["continuation"], shown);
  EXPECT_EQ(figures["runs"][0]["settings"][0]["help"], shown);
  EXPECT_EQ(figures["timeline"]["rows"][0]["bars"], Json::array({{0, 0.005, shown}}));
}

TEST(ReportPage, LoadsNothingFromAnywhere) {
  std::string page = report_page({.facts = {}, .history = history_of(9), .timeline = {}});
  // The name of a namespace, which is never loaded.
  page.erase(page.find("http://www.w3.org/2000/svg"), 7);
  for (const char* const loader :
       {"http:", "https:", " src=", "url(", "@import", "fetch(", "XMLHttp", "REPORT_DATA"})
    EXPECT_THAT(page, Not(HasSubstr(loader)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

TEST(ReportPage, KnowsHowTheRunStands) {
  RunHistory history;
  EXPECT_EQ(figures_of(history)["runs"][0]["step"], 0);
  EXPECT_EQ(figures_of(history)["is_live"], true);
  history.add(StepRecord{.step = 3, .total_steps = 10, .terms = {{"underflow", 0.125}}});
  EXPECT_FALSE(figures_of(history)["runs"][0].contains("end"));
  history.add(EndRecord{.step = 3, .seconds = 112, .stopped_by = "SIGTERM"});
  const Json figures = figures_of(history, {.title = "a title"});
  EXPECT_EQ(figures["title"], "a title");
  EXPECT_EQ(figures["is_live"], false);
  EXPECT_EQ(figures["runs"][0]["total_steps"], 10);
  EXPECT_EQ(figures["runs"][0]["terms"]["underflow"], 0.125);
  EXPECT_EQ(figures["runs"][0]["end"], Json({{"stopped_by", "SIGTERM"}, {"seconds", 112}}));
  history.add(RunFacts{.resumed_step = 3});
  EXPECT_EQ(figures_of(history)["runs"][0]["resumed"], Json({3}));
}

TEST(TimelinePage, JoinsWhatIsTooNarrowAndCountsOverlapsOnce) {
  std::vector<TimelineSpan> spans;
  for (int i = 0; i < 100000; ++i) spans.push_back({"compute", i * 1.0, i + 0.9, "op"});
  spans.push_back({"gather", 0, 40000, "outer"});
  spans.push_back({"gather", 1000, 2000, "inner"});
  spans.push_back({"gather", 30000, 50000, "next"});
  spans.push_back({"other", 1, 2, "x"});
  spans.push_back({"update", 99000, 100000, "AdamW"});
  const std::string page = timeline_page("x", spans);
  EXPECT_LT(page.size(), 100000);
  const Json rows = figures_of(page)["timeline"]["rows"];
  ASSERT_EQ(rows.size(), 4);
  EXPECT_LE(rows[0]["bars"].size(), 500);
  EXPECT_NEAR(rows[0]["busy_ms"], 90, 1e-3);
  EXPECT_EQ(rows[1], Json({{"name", "gather"},
                           {"busy_ms", 50},
                           {"bars", Json::array({{0, 50, "outer and 1 more"}})}}));
  EXPECT_EQ(rows[2]["name"], "update");
  EXPECT_EQ(rows[3]["name"], "other");
  EXPECT_TRUE(figures_of(timeline_page("x", {}))["timeline"].is_null());
}

TEST(ComparisonPage, HasEachRunByItsName) {
  const std::vector<LoggedRun> runs = {
      {.name = "one",
       .facts = {.settings = {{"optimizer", "lr", "0.1", true, ""}}},
       .history = history_of(60)},
      {.name = "two<b>", .history = history_of(30)}};
  const std::string page = comparison_page(runs);
  EXPECT_THAT(page, Not(HasSubstr("two<b>")));
  const Json figures = figures_of(page);
  EXPECT_EQ(figures["title"], "2 runs");
  EXPECT_EQ(figures["is_live"], false);
  EXPECT_EQ(figures["runs"][1]["name"], "two<b>");
  EXPECT_EQ(figures["runs"][0]["settings"][0]["value"], "0.1");
  EXPECT_EQ(figures_of(comparison_page(std::span(runs).first(1)))["title"], "Training run");
}

TEST(ReportFile, TakesAHundredthOfTheTimeAtMost) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  double now = 0;
  ReportFile file(dir / "new/report.html", "--report", [&] { return now; });
  EXPECT_TRUE(file.is_due());
  file.write([&] { return now += 0.01, "first"; });
  EXPECT_FALSE(file.is_due());
  now += 4.9;
  EXPECT_FALSE(file.is_due());
  now += 0.2;
  EXPECT_TRUE(file.is_due());
  file.write([&] { return now += 2, "slow"; });
  now += 190;
  EXPECT_FALSE(file.is_due());
  now += 10;
  EXPECT_TRUE(file.is_due());
  EXPECT_EQ(read_text_file(dir / "new/report.html", 100), "slow");
}

TEST(ReportFile, WarnsOnceWhenTheDiskIsFullAndKeepsTheLastPage) {
  const testing::TempDir dir;
  EXPECT_THROW(ReportFile(dir.path()), Error);  // no file, which a page would replace
  EXPECT_THROW(ReportFile("/dev/null"), Error);
  ReportFile file(dir / "report.html");
  file.write([] { return "first"; });
  ::testing::internal::CaptureStderr();
  {
    const testing::FileSizeLimit limit(5000);
    for (int i = 0; i < 3; ++i) file.write([] { return std::string(10000, 'x'); });
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("training goes on without it"));
  EXPECT_EQ(said.find("goes on"), said.rfind("goes on"));
  EXPECT_EQ(read_text_file(dir / "report.html", 100), "first");
  EXPECT_THAT(names_in(dir.path()), ElementsAre("report.html"));
}

}  // namespace
}  // namespace fsdp::train::report_page_test
