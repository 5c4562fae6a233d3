// optim/learning_rate.h: every schedule at its corners.
#include "fsdp/optim/learning_rate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "fsdp/base/error.h"

namespace fsdp::learning_rate_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kRate = 0.5;

LearningRateOptions schedule(RateSchedule kind, int64_t warmup, int64_t total, double floor = 0) {
  LearningRateOptions options{.schedule = kind,
                              .rate = kRate,
                              .floor = floor,
                              .warmup_steps = warmup,
                              .total_steps = total};
  if (kind == RateSchedule::kWsd) options.decay_steps = total - warmup;
  options.validate();
  return options;
}

std::vector<double> rates(const LearningRateOptions& options, int64_t first, int64_t last) {
  std::vector<double> all;
  for (int64_t step = first; step <= last; ++step) all.push_back(learning_rate(options, step));
  return all;
}

TEST(LearningRate, WarmsUpFromTheFirstShareToTheWholeRate) {
  for (const RateSchedule kind : all_rate_schedules()) {
    const LearningRateOptions options = schedule(kind, 4, 100, 0.1);
    EXPECT_EQ(rates(options, 1, 5), (std::vector{0.125, 0.25, 0.375, 0.5, 0.5})) << name_of(kind);
  }
}

TEST(LearningRate, StartsAtTheWholeRateWithoutWarmUp) {
  for (const RateSchedule kind : all_rate_schedules()) {
    EXPECT_EQ(learning_rate(schedule(kind, 0, 100), 1), kRate) << name_of(kind);
    EXPECT_EQ(learning_rate(schedule(kind, 1, 100), 1), kRate) << "one step of warm-up is whole";
    EXPECT_EQ(learning_rate(schedule(kind, 0, 1), 1), kRate) << "the only step";
  }
}

TEST(LearningRate, ConstantNeverEnds) {
  const LearningRateOptions options{.rate = kRate, .warmup_steps = 2};
  options.validate();
  EXPECT_EQ(rates(options, 1, 3), (std::vector{0.25, 0.5, 0.5}));
  EXPECT_EQ(learning_rate(options, int64_t{1} << 40), kRate);
  LearningRateOptions with_total = options;
  with_total.total_steps = 10;
  EXPECT_EQ(learning_rate(with_total, 11), kRate) << "total_steps is ignored";
}

TEST(LearningRate, LinearFallsByEqualAmountsToTheFloor) {
  const LearningRateOptions options = schedule(RateSchedule::kLinear, 2, 6, 0.1);
  const std::vector<double> expected = {0.25, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1};
  for (int64_t step = 1; step <= 8; ++step)
    EXPECT_DOUBLE_EQ(learning_rate(options, step), expected[static_cast<size_t>(step - 1)]) << step;
}

TEST(LearningRate, CosineIsHalfWayInTheMiddle) {
  const LearningRateOptions options = schedule(RateSchedule::kCosine, 10, 110, 0.1);
  EXPECT_EQ(learning_rate(options, 10), kRate);
  EXPECT_EQ(learning_rate(options, 11), kRate);
  EXPECT_DOUBLE_EQ(learning_rate(options, 61), 0.3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 36), 0.1 + 0.4 * (1 + std::sqrt(0.5)) / 2);
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.1 + 0.2 * (1 - std::cos(M_PI / 100)));
  EXPECT_EQ(learning_rate(options, 111), 0.1);
  EXPECT_EQ(learning_rate(options, 1 << 30), 0.1);
}

TEST(LearningRate, WsdIsStableUntilTheLastSteps) {
  LearningRateOptions options = schedule(RateSchedule::kWsd, 2, 10, 0.1);
  options.decay_steps = 4;
  options.validate();
  // Steps 3 to 6 are stable; of the four that decay, the first has the whole rate still.
  EXPECT_EQ(rates(options, 3, 7), std::vector(5, kRate));
  EXPECT_DOUBLE_EQ(learning_rate(options, 8), 0.4);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 0.3);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 0.2);
  EXPECT_EQ(learning_rate(options, 11), 0.1);
  options.decay = RateDecay::kOneMinusSqrt;
  EXPECT_EQ(rates(options, 3, 7), std::vector(5, kRate));
  EXPECT_DOUBLE_EQ(learning_rate(options, 8), 0.1 + 0.4 * (1 - std::sqrt(0.25)));
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 0.1 + 0.4 * (1 - std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 0.1 + 0.4 * (1 - std::sqrt(0.75)));
  EXPECT_EQ(learning_rate(options, 11), 0.1);
}

TEST(LearningRate, WsdThatOnlyDecaysIsLinear) {
  const LearningRateOptions wsd = schedule(RateSchedule::kWsd, 3, 20, 0.01);
  EXPECT_EQ(rates(wsd, 1, 25), rates(schedule(RateSchedule::kLinear, 3, 20, 0.01), 1, 25));
}

TEST(LearningRate, EndsWithTheWarmUpWhereThatIsAll) {
  for (const RateSchedule kind : {RateSchedule::kLinear, RateSchedule::kCosine}) {
    const LearningRateOptions options = schedule(kind, 4, 4, 0.1);
    EXPECT_EQ(rates(options, 1, 6), (std::vector{0.125, 0.25, 0.375, 0.5, 0.1, 0.1}));
  }
}

TEST(LearningRate, RisesThenFallsAndWastesNoStep) {
  for (const RateSchedule kind : all_rate_schedules())
    for (const RateDecay decay : all_rate_decays())
      for (const int64_t warmup : {0, 1, 7, 39})
        for (const double floor : {0.0, 0.05, kRate}) {
          LearningRateOptions options = schedule(kind, warmup, 40, floor);
          options.decay = decay;
          double before = 0;
          for (int64_t step = 1; step <= 40; ++step) {
            const double now = learning_rate(options, step);
            EXPECT_GT(now, 0) << step;
            EXPECT_LE(now, kRate) << step;
            if (step <= warmup) {
              EXPECT_GT(now, before) << step;
            } else {
              EXPECT_LE(now, step == 1 ? kRate : before) << step;
              EXPECT_GE(now, floor) << step;
            }
            before = now;
          }
          EXPECT_LE(learning_rate(options, 41), before);
        }
}

TEST(LearningRate, IsRefusedBeforeTheFirstStep) {
  EXPECT_THAT([] { learning_rate({}, 0); },
              ThrowsMessage<UsageError>(HasSubstr("step is 0; the first update is step 1")));
}

TEST(LearningRateOptions, NameFieldValueAndFix) {
  using enum RateSchedule;
  struct Bad {
    LearningRateOptions options;
    const char* says;
  };
  const std::vector<Bad> table = {
      {{.rate = -1}, "rate is -1; it must be a number of 0 or more"},
      {{.rate = INFINITY}, "rate is inf"},
      {{.rate = NAN}, "rate is nan"},
      {{.rate = 0.1, .floor = 0.2}, "floor is 0.2; it must be from 0 to the rate, 0.1"},
      {{.rate = 0.1, .floor = -0.2}, "floor is -0.2"},
      {{.warmup_steps = -1}, "warmup_steps is -1; it must be 0 or more"},
      {{.total_steps = -1}, "total_steps is -1"},
      {{.schedule = kWsd, .total_steps = 9, .decay_steps = -1}, "decay_steps is -1"},
      {{.schedule = kCosine}, "total_steps is 0; cosine must know its last step"},
      {{.schedule = kLinear, .warmup_steps = 11, .total_steps = 10},
       "warmup_steps is 11; it must be at most total_steps = 10"},
      {{.schedule = kWsd, .total_steps = 10}, "decay_steps is 0; wsd needs 1 or more"},
      {{.schedule = kWsd, .warmup_steps = 3, .total_steps = 10, .decay_steps = 8},
       "decay_steps is 8; it must be at most the 7 steps that follow the warm-up"},
      {{.schedule = kCosine, .total_steps = 10, .decay_steps = 8},
       "decay_steps is 8, but the schedule is cosine; only wsd"},
  };
  for (const Bad& bad : table)
    EXPECT_THAT([&] { bad.options.validate(); }, ThrowsMessage<UsageError>(HasSubstr(bad.says)));
  EXPECT_NO_THROW(LearningRateOptions{}.validate());
  EXPECT_NO_THROW(LearningRateOptions{.rate = 0}.validate());
}

}  // namespace
}  // namespace fsdp::learning_rate_test
