// The bounded history of a run's figures.
#include "fsdp/train/log/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fsdp::train::run_history_test {
namespace {

using ::testing::ElementsAre;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Series, KeepsEveryValueWhileTheyAreFew) {
  Series series;
  for (int64_t step = 1; step <= 1000; ++step) series.add(step, static_cast<double>(step * step));
  ASSERT_EQ(series.buckets().size(), 1000);
  EXPECT_EQ(series.buckets()[41].first_step, 42);
  EXPECT_EQ(series.buckets()[41].mean(), 42 * 42);
}

TEST(Series, KeepsExtremesAndMeansInBoundedMemory) {
  Series series;
  constexpr int64_t kSteps = 1000000;
  double sum = 0;
  for (int64_t step = 1; step <= kSteps; ++step) {
    const double value = step == 777777 ? 1e6
                         : step == 3    ? -1e6
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

TEST(Series, TakesStepsWithHolesAndLateBeginnings) {
  Series series;
  for (int64_t step = 5000000; step < 5100000; step += 7) series.add(step, 1);
  EXPECT_LE(series.buckets().size(), 2048);
  EXPECT_GE(series.buckets().size(), 900);
}

TEST(SmoothedMeans, DoNotShiftATrend) {
  Series series;
  for (int64_t step = 1; step <= 400; ++step)
    series.add(step, 3 * static_cast<double>(step) + (step % 2 == 0 ? 10 : -10));
  const std::vector<double> smooth = smoothed_means(series.buckets());
  for (size_t i = 20; i < 380; ++i)
    EXPECT_NEAR(smooth[i], 3 * static_cast<double>(i + 1), 1) << i;  // 10 / 21 of the noise is left
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

TEST(Series, TellsItsEndAndItsTypicalValue) {
  Series series;
  EXPECT_TRUE(series.recent().is_empty());
  EXPECT_TRUE(std::isnan(series.median()));
  for (int64_t step = 1; step <= 500; ++step) series.add(step, static_cast<double>(step));
  EXPECT_EQ(series.recent().first_step, 495);
  EXPECT_EQ(series.recent().last_step, 500);
  EXPECT_EQ(series.recent().mean(), 497.5);
  EXPECT_EQ(series.median(), 251);
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
    restored.restore(*parse_log_line(log_line_of(record, 0)));
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
    EXPECT_EQ(history->loss().buckets().size(), 30);
    EXPECT_EQ(history->loss().buckets()[8].num_nonfinite, 1);
    EXPECT_EQ(history->loss().buckets()[29].mean(), 1.0 / 30);
    EXPECT_EQ(history->best_validation()->step, 20);
    EXPECT_EQ(history->num_outliers(), 1);
    EXPECT_EQ(history->num_skipped(), 1);
    EXPECT_EQ(history->checkpoints().front().path, "x");
    EXPECT_NEAR(history->step_seconds(), 3, 1e-9);
  }
}

TEST(RunHistory, GoesOnAfterAResume) {
  RunHistory history;
  history.restore(RunStart{0});
  history.restore(EndRecord{.step = 5, .stopped_by = "SIGTERM"});
  EXPECT_TRUE(history.end());
  history.add(RunStart{5});
  EXPECT_FALSE(history.end());
  EXPECT_THAT(history.resumed_steps(), ElementsAre(5));
}

TEST(RunHistory, KeepsTheNewestOfManyCheckpoints) {
  RunHistory history;
  for (int64_t step = 1; step <= 1000; ++step) history.add(CheckpointRecord{.step = step});
  EXPECT_EQ(history.num_checkpoints(), 1000);
  EXPECT_EQ(history.checkpoints().size(), 50);
  EXPECT_EQ(history.checkpoints().back().step, 1000);
}

}  // namespace
}  // namespace fsdp::train::run_history_test
