// The report as text; tests/processes/report_test.py has a browser open it.
#include "fsdp/train/report/report_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "fsdp/base/error.h"
#include "fsdp/train/log/utf8_text.h"
#include "fsdp/train/report/chart_axis.h"
#include "fsdp/train/report/line_chart.h"
#include "fsdp/train/report/timeline_chart.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"

namespace fsdp::train::report_page_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Scale = ChartAxis::Scale;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> labels_of(const ChartAxis& axis) {
  std::vector<std::string> labels;
  for (const AxisTick& tick : axis.ticks()) labels.push_back(tick.label);
  return labels;
}

TEST(ChartAxis, HasRoundTicksWithTheDigitsTheyNeed) {
  EXPECT_THAT(labels_of(ChartAxis(1, 300, Scale::kLinear)),
              ElementsAre("50", "100", "150", "200", "250", "300"));
  EXPECT_THAT(labels_of(ChartAxis(0, 0.003, Scale::kLinear)),
              ElementsAre("0", "0.0005", "0.0010", "0.0015", "0.0020", "0.0025", "0.0030"));
  EXPECT_THAT(labels_of(ChartAxis(1.5, 5.6, Scale::kLinear)), ElementsAre("2", "3", "4", "5"));
  EXPECT_THAT(labels_of(ChartAxis(0, 26000, Scale::kLinear)),
              ElementsAre("0", "5k", "10k", "15k", "20k", "25k"));
  EXPECT_THAT(labels_of(ChartAxis(0, 6000, Scale::kLinear)),
              ElementsAre("0", "1,000", "2,000", "3,000", "4,000", "5,000", "6,000"));
  EXPECT_THAT(labels_of(ChartAxis(0, 2.4e6, Scale::kLinear)),
              ElementsAre("0", "0.5M", "1.0M", "1.5M", "2.0M"));
  EXPECT_THAT(labels_of(ChartAxis(0, 6e-5, Scale::kLinear)),
              ElementsAre("0", "1e-05", "2e-05", "3e-05", "4e-05", "5e-05", "6e-05"));
  EXPECT_THAT(labels_of(ChartAxis(0.5, 50, Scale::kLogarithmic)),
              ElementsAre("0.5", "1", "2", "5", "10", "20", "50"));
  EXPECT_THAT(labels_of(ChartAxis(1e-3, 1e9, Scale::kLogarithmic)).size(), ::testing::Le(8));
}

TEST(ChartAxis, HasAFewTicksOnAnyRange) {
  for (int exponent = -12; exponent <= 12; ++exponent)
    for (const double low : {0.0, 0.3, 1.0, 7.7})
      for (const double range : {1.0, 1.7, 3.1, 5.0, 9.9}) {
        const double unit = std::pow(10.0, exponent);
        const size_t num_ticks =
            ChartAxis(low * unit, (low + range) * unit, Scale::kLinear).ticks().size();
        EXPECT_GE(num_ticks, 3) << low << " " << range << " " << exponent;
        EXPECT_LE(num_ticks, 8) << low << " " << range << " " << exponent;
      }
}

TEST(ChartAxis, BearsEqualEndsAndValuesWithoutALogarithm) {
  const ChartAxis flat(5, 5, Scale::kLinear);
  EXPECT_NEAR(flat.position(5), 0.5, 1e-9);
  EXPECT_FALSE(flat.ticks().empty());
  EXPECT_NEAR(ChartAxis(0, 0, Scale::kLinear).position(0), 0.5, 1e-9);
  EXPECT_EQ(ChartAxis(-1, 5, Scale::kLogarithmic).scale(), Scale::kLinear);
  EXPECT_EQ(ChartAxis(1, 100, Scale::kLogarithmic).position(-3), 0);
  EXPECT_NEAR(ChartAxis(1, 100, Scale::kLogarithmic).position(10), 0.5, 1e-9);
}

TEST(Text, IsValidAndEscaped) {
  EXPECT_EQ(clean_utf8("a\tb\n\xc3\xa9\xf0\x9f\x99\x82"), "a\tb\n\xc3\xa9\xf0\x9f\x99\x82");
  const std::string mark = "\xef\xbf\xbd";
  EXPECT_EQ(clean_utf8("\x1b[2J"), mark + "[2J");
  EXPECT_EQ(clean_utf8("\xc3"), mark);                        // cut short
  EXPECT_EQ(clean_utf8("\xc0\xaf"), mark + mark);             // '/' in two bytes
  EXPECT_EQ(clean_utf8("\xed\xa0\x80"), mark + mark + mark);  // half of a pair
  EXPECT_EQ(clean_utf8("\xc2\x9b"), mark);                    // a control character of two bytes
  EXPECT_EQ(clean_utf8("\xf4\x90\x80\x80").size(), 4 * mark.size());
  EXPECT_EQ(html_text("<a href=\"x\">&'"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
}

LineChart chart_of(std::vector<double> values) {
  LineChart chart{.id = "x", .title = "X"};
  chart.lines.push_back({.name = "x"});
  for (size_t i = 0; i < values.size(); ++i)
    chart.lines[0].points.push_back({static_cast<double>(i + 1), values[i]});
  return chart;
}

TEST(LineChart, HasGapsWhereValuesAreNotFinite) {
  const std::string html = line_chart_html(chart_of({1, 2, kNan, 2, 1}));
  EXPECT_THAT(html, HasSubstr("class=\"main\" d=\"M0,300L250,0M750,0L1000,300\""));
  EXPECT_THAT(html, HasSubstr("\"y\":[1,2,null,2,1]"));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
  EXPECT_EQ(line_chart_html(chart_of({kNan, kNan})), "");
  EXPECT_EQ(line_chart_html(chart_of({})), "");
  EXPECT_THAT(line_chart_html(chart_of({7})), HasSubstr("<svg"));  // one point
}

TEST(LineChart, UsesALogarithmWhereValuesAreFarApart) {
  EXPECT_THAT(line_chart_html(chart_of({1, 50, 2})), HasSubstr("log scale"));
  EXPECT_THAT(line_chart_html(chart_of({1, 5, 2})), Not(HasSubstr("log scale")));
  EXPECT_THAT(line_chart_html(chart_of({-1, 50, 2})), Not(HasSubstr("log scale")));
}

TEST(LineChart, MarksOnlyStepsThatItHas) {
  LineChart chart = chart_of({1, 2, 3});
  chart.marks = {0, 2, 9};
  const std::string html = line_chart_html(chart);
  EXPECT_THAT(html, HasSubstr("class=\"mark\" d=\"M500,0V300\""));
  EXPECT_EQ(html.find("class=\"mark\""), html.rfind("class=\"mark\""));
}

TEST(LineChart, SaysWhatItCutsOff) {
  std::vector<double> values(100, 300.0);
  values[0] = 5000;
  LineChart chart = chart_of(values);
  chart.begins_at_zero = chart.cuts_peaks = true;
  EXPECT_THAT(line_chart_html(chart), HasSubstr("The highest value, 5,000 at step 1, is outside."));
}

TEST(Timeline, JoinsWhatIsTooNarrowAndCountsOverlapsOnce) {
  std::vector<TimelineSpan> spans;
  for (int i = 0; i < 100000; ++i) spans.push_back({"compute", i * 1.0, i + 0.9, "op"});
  spans.push_back({"gather", 0, 40000, "outer"});
  spans.push_back({"gather", 1000, 2000, "inner"});
  spans.push_back({"gather", 30000, 50000, "next"});
  spans.push_back({"other", 1, 2, "x"});
  spans.push_back({"update", 99000, 100000, "AdamW"});
  const std::vector<TimelineRow> rows = timeline_rows(spans);
  ASSERT_EQ(rows.size(), 4);
  EXPECT_EQ(rows[0].name, "compute");
  EXPECT_EQ(rows[1].name, "gather");
  EXPECT_EQ(rows[2].name, "update");
  EXPECT_EQ(rows[3].name, "other");
  EXPECT_LE(rows[0].bars.size(), 500);
  EXPECT_NEAR(rows[0].busy_us, 90000, 1);
  EXPECT_NEAR(rows[1].busy_us, 50000, 1e-6);
  EXPECT_EQ(timeline_chart_html({}), "");
  EXPECT_LT(timeline_chart_html(spans).size(), 100000);
}

// A run of so many steps, with a spike and some losses that are not finite.
RunHistory history_of(int64_t num_steps) {
  RunHistory history;
  history.add(RunStart{});
  for (int64_t step = 1; step <= num_steps; ++step) {
    const double at = static_cast<double>(step);
    history.add(StepRecord{
        .step = step,
        .total_steps = num_steps,
        .loss = step % 1000 == 500 ? kNan : 2 + 3 / std::sqrt(at) + 0.1 * std::sin(at * at),
        .learning_rate = 1e-3 / at,
        .gradient_norm = 1 + std::cos(at),
        .milliseconds = 100 + std::sin(at),
        .tokens_per_second = 1e5 + 1e3 * std::sin(at)});
    if (step % 50 == 0) history.add(ValidationRecord{.step = step, .loss = 2 + 3 / std::sqrt(at)});
    if (step % 100 == 0) history.add(CheckpointRecord{.step = step, .path = "p"});
  }
  return history;
}

TEST(ReportPage, StaysSmallAndQuickForLongRuns) {
  const RunFacts facts{.title = "x"};
  const RunHistory history = history_of(100000);
  const auto start = std::chrono::steady_clock::now();
  const std::string page = report_page({.facts = facts, .history = history, .timeline = {}});
  const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - start;
  std::printf("%zu bytes in %.1f ms\n", page.size(), passed.count());
  EXPECT_LT(page.size(), 500000);
  EXPECT_LT(passed.count(), 1000);
}

TEST(ReportPage, ShowsNoTextAsMarkup) {
  const std::string bad = "<script>alert('x')</script>";
  const RunFacts facts{.title = bad,
                       .settings = {{bad, bad, bad, true, bad}},
                       .environment = {{bad, bad}},
                       .memory = {{bad, 1, 1, false}}};
  RunHistory history = history_of(50);
  history.add(CheckpointRecord{.step = 50, .path = bad});
  history.add(EndRecord{.step = 50, .stopped_by = bad});
  const std::vector<TimelineSpan> timeline = {{bad, 0, 5, bad}};
  const TextSample sample{.step = 1, .prompt = bad, .continuation = bad};
  const std::string page = report_page(
      {.facts = facts, .history = history, .timeline = timeline, .sample = &sample, .time = 0});
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(&#39;x&#39;)"));
}

TEST(ReportPage, LoadsNothingFromAnywhere) {
  const RunFacts facts{.title = "x"};
  const RunHistory history = history_of(100);
  const std::string page = report_page({.facts = facts, .history = history, .timeline = {}});
  for (const char* const loader :
       {"http:", "https:", " src=", "url(", "@import", "fetch(", "XMLHttp"})
    EXPECT_THAT(page, Not(HasSubstr(loader)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

TEST(ReportPage, SaysHowTheRunStands) {
  const RunFacts facts;
  RunHistory history;
  const auto page = [&] {
    return report_page({.facts = facts, .history = history, .timeline = {}});
  };
  EXPECT_THAT(page(), HasSubstr("No step is done yet."));
  EXPECT_THAT(page(), HasSubstr("http-equiv=\"refresh\""));
  history.add(StepRecord{.step = 3, .total_steps = 10, .loss = kNan});
  EXPECT_THAT(page(), HasSubstr("<b>Running:</b> step 3 of 10"));
  history.add(EndRecord{.step = 3, .stopped_by = "SIGTERM"});
  EXPECT_THAT(page(), HasSubstr("<b>Stopped</b> by SIGTERM after step 3 of 10"));
  EXPECT_THAT(page(), Not(HasSubstr("http-equiv=\"refresh\"")));
  history.add(EndRecord{.step = 10, .seconds = 112});
  EXPECT_THAT(page(), HasSubstr("<b>Complete:</b>"));
}

TEST(ReportPage, NamesTheStepsOfTheLossThatItShows) {
  const RunFacts facts;
  const auto page = [&](int64_t num_steps) {
    const RunHistory history = history_of(num_steps);
    return report_page({.facts = facts, .history = history, .timeline = {}});
  };
  EXPECT_THAT(page(7), HasSubstr("<small>step 7</small>"));
  EXPECT_THAT(page(400), HasSubstr("<small>mean of steps 396 to 400</small>"));
}

TEST(ReportPage, SaysWhoseMemoryItShows) {
  RunHistory history = history_of(3);
  history.add(StepRecord{.step = 4, .peak_bytes = 1 << 20});
  const auto page = [&](const std::string& device) {
    const RunFacts facts{.settings = {{"machine", "device", device, false, ""}},
                         .memory = {{"weights", 1, 1, false}}};
    return report_page({.facts = facts, .history = history, .timeline = {}});
  };
  EXPECT_THAT(page("cpu"), HasSubstr("<small>of the process</small>"));
  EXPECT_THAT(page("cpu"), HasSubstr("Peak memory, above, is all memory of the process: "));
  EXPECT_THAT(page("cuda"), HasSubstr("<small>of rank 0's GPU</small>"));
}

TEST(ReportPage, ShowsWhatQuantisedWeightsLose) {
  const RunFacts facts;
  RunHistory history = history_of(3);
  const auto page = [&] {
    return report_page({.facts = facts, .history = history, .timeline = {}});
  };
  EXPECT_THAT(page(), Not(HasSubstr("lost in codes")));
  history.add(StepRecord{.step = 4, .terms = {{"overflow", 0.25}, {"underflow", 0.125}}});
  EXPECT_THAT(page(), HasSubstr("Weights lost in codes</dt><dd>12.5 %"));
  EXPECT_THAT(page(), HasSubstr("became 0; 25 % out of range"));
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

TEST(ReportFile, RefusesWhatAPageWouldReplaceAndIsNoFile) {
  const testing::TempDir dir;
  EXPECT_THROW(ReportFile file(dir.path()), Error);
  EXPECT_THROW(ReportFile file("/dev/null"), Error);
}

}  // namespace
}  // namespace fsdp::train::report_page_test
