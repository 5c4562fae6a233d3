// The bounded history of a run's figures, which losses are called outliers on curves like those of
// training, and runs read from their logs.
#include "fsdp/train/log/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "support/error_of.h"
#include "support/temp_dir.h"

namespace fsdp::train::run_history_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Series, KeepsExtremesAndMeansInBoundedMemory) {
  Series series;
  constexpr int64_t kSteps = 100000;
  double sum = 0;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const double value = step == 77777 ? 1e6
                         : step == 3   ? -1e6
                                       : std::sin(static_cast<double>(step));
    sum += value;
    series.add(step, value);
    ASSERT_LE(series.buckets().size(), 2048);
  }
  EXPECT_GE(series.buckets().size(), 900) << "fine enough for a chart";
  for (const size_t size : {size_t{2048}, size_t{600}, size_t{1}}) {
    const std::vector<SeriesBucket> buckets = series.coarse(size);
    ASSERT_LE(buckets.size(), size);
    SeriesBucket all;
    int64_t next = 1;
    for (const SeriesBucket& bucket : buckets) {
      EXPECT_EQ(bucket.first_step, next);
      next = bucket.last_step + 1;
      all.join(bucket);
    }
    EXPECT_EQ(next, kSteps + 1) << "no step is lost";
    EXPECT_EQ(all.max, 1e6);
    EXPECT_EQ(all.min, -1e6);
    EXPECT_EQ(all.count, kSteps);
    EXPECT_NEAR(all.sum, sum, 1e-3);
  }
}

TEST(Series, CountsWhatIsNotFiniteApart) {
  Series series;
  series.add(1, kNan);
  series.add(2, 5);
  series.add(3, std::numeric_limits<double>::infinity());
  const SeriesBucket all = series.coarse(1).at(0);
  EXPECT_EQ(all.num_nonfinite, 2);
  EXPECT_EQ(all.count, 1);
  EXPECT_EQ(all.min, 5);
  EXPECT_EQ(all.mean(), 5);
}

TEST(Series, KeepsAHistoryOfAnyLength) {
  Series series;
  EXPECT_TRUE(series.recent().is_empty());
  EXPECT_TRUE(std::isnan(series.median()));
  for (int64_t step = 1; step <= 500; ++step) series.add(step, static_cast<double>(step));
  // Every value while they are few.
  ASSERT_EQ(series.buckets().size(), 500);
  EXPECT_EQ(series.buckets()[41].first_step, 42);
  EXPECT_EQ(series.buckets()[41].mean(), 42);
  EXPECT_EQ(series.recent().first_step, 495);
  EXPECT_EQ(series.recent().mean(), 497.5);
  EXPECT_EQ(series.median(), 251);
  // With holes, and from a late beginning.
  Series late;
  for (int64_t step = 5000000; step < 5100000; step += 7) late.add(step, 1);
  EXPECT_LE(late.buckets().size(), 2048);
  EXPECT_GE(late.buckets().size(), 900);
}

TEST(SmoothedMeans, LeaveALineAsItIsToItsEnds) {
  for (const int64_t num_steps : {40, 399, 601, 5003}) {  // 5003: the last bucket has fewer steps
    Series series;
    for (int64_t step = 1; step <= num_steps; ++step)
      series.add(step, 5 - 2 * static_cast<double>(step));
    const std::vector<SeriesBucket> buckets = series.coarse(600);
    const std::vector<double> smooth = smoothed_means(buckets);
    for (size_t i = 0; i < smooth.size(); ++i)
      EXPECT_NEAR(smooth[i], 5 - 2 * buckets[i].middle_step(), 1e-6) << num_steps << " " << i;
  }
}

// A last step far off bent the whole end of the curve to itself.
TEST(SmoothedMeans, DoNotEndInTheLastStepsNoise) {
  Series series;
  for (int64_t step = 1; step <= 400; ++step) series.add(step, step == 400 ? 12.0 : 2.0);
  const std::vector<double> smooth = smoothed_means(series.buckets());
  // At its end a line through 21 points gives the last one a weight of 4 / 21 at most.
  EXPECT_LT(smooth.back(), 2 + 10 * 4.0 / 21);
  EXPECT_GT(smooth.back(), 2);
}

TEST(SmoothedMeans, PassOverWhatIsNotFinite) {
  Series series;
  for (int64_t step = 1; step <= 100; ++step) series.add(step, step % 3 == 0 ? kNan : 2.0);
  for (const double value : smoothed_means(series.buckets())) EXPECT_NEAR(value, 2, 1e-9);
}

TEST(RunHistory, IsTheSameRestoredFromTheLog) {
  RunHistory live;
  RunHistory restored;
  const auto both = [&](const auto& record) {
    live.add(record);
    restored.add(*parse_log_line(log_line(record, 0)));
  };
  for (int64_t step = 1; step <= 30; ++step) {
    both(StepRecord{.step = step,
                    .total_steps = 30,
                    .loss = step == 9 ? kNan : 1.0 / static_cast<double>(step),
                    .loss_z = step == 20 ? 5.5 : 0,
                    .learning_rate = 1e-3,
                    .milliseconds = 100,
                    .is_skipped = step == 9});
    if (step % 10 == 0)
      both(ValidationRecord{.step = step, .loss = std::abs(25.0 - static_cast<double>(step))});
  }
  both(CheckpointRecord{.step = 30, .path = "x"});
  for (const RunHistory* history : {&live, &restored}) {
    EXPECT_EQ(history->loss.buckets().size(), 30);
    EXPECT_EQ(history->loss.buckets()[8].num_nonfinite, 1);
    EXPECT_EQ(history->loss.buckets()[29].mean(), 1.0 / 30);
    EXPECT_EQ(history->best_validation->step, 20);
    EXPECT_EQ(history->num_outliers, 1);
    EXPECT_EQ(history->num_skipped, 1);
    EXPECT_EQ(history->checkpoints.front().path, "x");
    EXPECT_NEAR(history->step_seconds, 3, 1e-9);
  }
  for (int64_t step = 31; step <= 1000; ++step) live.add(CheckpointRecord{.step = step});
  EXPECT_EQ(live.num_checkpoints, 971);
  EXPECT_EQ(live.checkpoints.size(), 50);  // the newest
  EXPECT_EQ(live.checkpoints.back().step, 1000);
  live.add(EndRecord{.step = 1000, .stopped_by = "SIGTERM"});
  live.add(RunFacts{.resumed_step = 1000});
  EXPECT_FALSE(live.end);
  EXPECT_THAT(live.resumed_steps, ElementsAre(1000));
}

// --- outliers ------------------------------------------------------------------------------------

// A loss that falls fast and then slowly, with noise of deviation 0.05.
class Curve {
 public:
  double next() {
    ++step_;
    return 2 + 3.5 * std::exp(-static_cast<double>(step_) / 80) + noise_(random_);
  }

 private:
  int64_t step_ = 0;
  std::mt19937 random_{7};
  std::normal_distribution<double> noise_{0, 0.05};
};

TEST(LossOutliers, SaysNothingDuringTheFirstSteps) {
  LossOutliers outliers;
  for (int i = 0; i < 20; ++i) EXPECT_EQ(outliers.add(i % 2 == 0 ? 1.0 : 100.0), 0) << i;
}

TEST(LossOutliers, MeasuresSpikesOfAnOrdinaryCurveInDeviations) {
  LossOutliers outliers;
  Curve curve;
  int num_marked = 0;
  for (int i = 0; i < 10000; ++i) num_marked += std::abs(outliers.add(curve.next())) >= kOutlierZ;
  // Normal noise is beyond four deviations in 0.6 of 10,000; the estimated deviation adds some.
  EXPECT_LE(num_marked, 5);
  EXPECT_NEAR(outliers.add(2 + 10 * 0.05), 10, 3);
  EXPECT_NEAR(outliers.add(2 - 10 * 0.05), -10, 3);
  EXPECT_GT(outliers.add(1e6), kOutlierZ);
  EXPECT_GT(outliers.add(3), kOutlierZ) << "a second one is seen after the first";
  double z = 0;
  for (int i = 0; i < 100; ++i) z = outliers.add(curve.next() + 5);
  EXPECT_LT(std::abs(z), kOutlierZ) << "a new level becomes usual";
}

TEST(LossOutliers, LeavesOutWhatIsNotFinite) {
  LossOutliers with;
  LossOutliers without;
  Curve curve;
  for (int i = 0; i < 200; ++i) {
    const double loss = curve.next();
    if (i % 7 == 0) {
      EXPECT_EQ(with.add(std::numeric_limits<double>::quiet_NaN()), 0);
      EXPECT_EQ(with.add(std::numeric_limits<double>::infinity()), 0);
    }
    EXPECT_EQ(with.add(loss), without.add(loss));
  }
}

TEST(LossOutliers, FindsNothingInEqualLosses) {
  LossOutliers outliers;
  for (int i = 0; i < 300; ++i) EXPECT_LT(std::abs(outliers.add(2.5 + 1e-12 * (i % 3))), 0.1) << i;
}

// --- logs ----------------------------------------------------------------------------------------

RunFacts facts_of(const std::string& rate) {
  return {.title = "a title",
          .settings = {{"optimizer", "lr", rate, rate != "0.004", ""},
                       {"data", "batch", "8", true, ""},
                       {"output", "log", concat("/", rate, "/log.jsonl"), false, ""},
                       {"", "of-another-version", "1", false, ""}},
          .environment = {{"host", rate}, {"libtorch", "2.13.0"}}};
}

std::string step_line(int64_t step, double loss) {
  return log_line(StepRecord{.step = step,
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
  std::string text = log_line(facts_of(rate), 0) + "\n";
  for (int64_t step = 1; step <= num_steps; ++step) text += step_line(step, 2.5) + "\n";
  make_directories(dir / name);
  write_file_durably(dir / name + "/log.jsonl", text + rest);
  return dir / name;
}

TEST(LoggedRun, HasFactsAndHistoryOfItsLog) {
  const testing::TempDir dir(testing::TempDir::On::kMemory);
  const std::string path = write_run(
      dir, "a", 5, "0.1",
      log_line(EndRecord{.step = 5, .num_steps = 5, .seconds = 3, .stopped_by = "SIGINT"}, 0) +
          "\n");
  for (const std::string& given : {path, path + "/", path + "/log.jsonl"}) {
    const LoggedRun run = read_logged_run(given);
    EXPECT_EQ(run.name, given == path + "/" ? path : given);
    EXPECT_EQ(run.facts.title, "a title");
    EXPECT_EQ(run.history.loss.buckets().size(), 5);
    EXPECT_EQ(run.history.end->stopped_by, "SIGINT");
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
                                  log_line(resumed, 0), "\n", step_line(4, 1.5), "\n",
                                  step_line(5, 1.25), "\n", step_line(6, 1).substr(0, 30));
  const LoggedRun run = read_logged_run(write_run(dir, "a", 6, "0.1", rest));
  std::vector<double> losses;
  for (const SeriesBucket& bucket : run.history.loss.buckets()) losses.push_back(bucket.mean());
  EXPECT_THAT(losses, ElementsAre(2.5, 2.5, 2.5, 1.5, 1.25));
  EXPECT_THAT(run.history.resumed_steps, ElementsAre(3));
  EXPECT_FALSE(run.history.end);
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

}  // namespace
}  // namespace fsdp::train::run_history_test
