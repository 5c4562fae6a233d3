// How a step begins: skipping, clipping, loss scales, powers.
#include "fsdp/optim/kernels/update_math.h"

#include <gtest/gtest.h>

#include <limits>

namespace fsdp::begin_step_test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

StepState begun(StepState state, const StepRule& rule) {
  begin_step(state, rule);
  return state;
}

TEST(BeginStep, LeavesGradientsAloneWithoutClippingAndScale) {
  const StepState state = begun({.squared_norm = 1e12}, {});
  EXPECT_EQ(state.gradient_factor, 1.0f);
  EXPECT_EQ(state.norm, 1e6);
  EXPECT_EQ(state.step, 1);
  EXPECT_EQ(state.skips, 0);
}

TEST(BeginStep, ClipsOnlyNormsAboveTheLimit) {
  const StepRule rule{.max_norm = 2.0};
  EXPECT_EQ(begun({.squared_norm = 1.0}, rule).gradient_factor, 1.0f);
  EXPECT_EQ(begun({.squared_norm = 0.0}, rule).gradient_factor, 1.0f);
  EXPECT_EQ(begun({.squared_norm = 64.0}, rule).gradient_factor,
            static_cast<float>(2.0 / (8.0 + 1e-6)));
  // At the limit the guard against division by 0 already clips a little, as torch does.
  EXPECT_EQ(begun({.squared_norm = 4.0}, rule).gradient_factor,
            static_cast<float>(2.0 / (2.0 + 1e-6)));
}

TEST(BeginStep, ClipsTheNormOfUnscaledGradients) {
  const StepState state =
      begun({.loss_scale = 1024.0, .squared_norm = 64.0 * 1024.0 * 1024.0}, {.max_norm = 2.0});
  EXPECT_EQ(state.norm, 8.0);
  EXPECT_EQ(state.gradient_factor, static_cast<float>(2.0 / (8.0 + 1e-6) / 1024.0));
}

TEST(BeginStep, MultipliesPowersOfTheBetas) {
  StepState state;
  const StepRule rule{.beta1 = 0.5, .beta2 = 0.75};
  for (int step = 0; step < 3; ++step) begin_step(state, rule);
  EXPECT_EQ(state.beta1_power, 0.125);
  EXPECT_EQ(state.beta2_power, 0.421875);
  EXPECT_EQ(state.step, 3);
}

TEST(BeginStep, SkipsNonfiniteGradientsWhereAskedTo) {
  for (const double squared_norm : {kInf, kNan}) {
    const StepRule rule{.max_norm = 1.0, .skips_nonfinite = true};
    StepState state = begun({.step = 4, .squared_norm = squared_norm}, rule);
    EXPECT_EQ(state.skips, 1);
    EXPECT_EQ(state.step, 4);
    EXPECT_EQ(state.skipped, 1);
    EXPECT_EQ(state.beta1_power, 1.0);
    EXPECT_EQ(state.loss_scale, 1.0) << "a static scale";
    state.squared_norm = 1.0;
    state = begun(state, rule);
    EXPECT_EQ(state.skips, 0);
    EXPECT_EQ(state.step, 5);
    EXPECT_EQ(state.skipped, 1);
  }
}

TEST(BeginStep, LetsNonfiniteGradientsThroughUnlessAskedToSkip) {
  EXPECT_EQ(begun({.squared_norm = kNan}, {}).skips, 0);
  // torch's clip_grad_norm_ does this, too: a NaN poisons every gradient, an Inf turns finite ones
  // to 0.
  const float poisoned = begun({.squared_norm = kNan}, {.max_norm = 1.0}).gradient_factor;
  EXPECT_NE(poisoned, poisoned);
  EXPECT_EQ(begun({.squared_norm = kInf}, {.max_norm = 1.0}).gradient_factor, 0.0f);
}

TEST(BeginStep, BacksOffAfterASkippedStepAndUsesTheOldScaleForIt) {
  const StepRule rule{.growth = 2.0, .backoff = 0.5};
  StepState state{.loss_scale = 8.0, .good_steps = 7, .squared_norm = kInf};
  begin_step(state, rule);
  EXPECT_EQ(state.skips, 1) << "a dynamic scale skips on its own";
  EXPECT_EQ(state.loss_scale, 4.0);
  EXPECT_EQ(state.good_steps, 0);
  EXPECT_EQ(state.gradient_factor, 0.125f);
}

TEST(BeginStep, GrowsAfterAnIntervalOfGoodStepsAndUsesTheOldScaleForIt) {
  const StepRule rule{.growth = 2.0, .backoff = 0.5, .growth_interval = 2};
  StepState state{.loss_scale = 8.0, .squared_norm = 1.0};
  begin_step(state, rule);
  EXPECT_EQ(state.loss_scale, 8.0);
  begin_step(state, rule);
  EXPECT_EQ(state.loss_scale, 16.0);
  EXPECT_EQ(state.good_steps, 0);
  EXPECT_EQ(state.gradient_factor, 0.125f);
  begin_step(state, rule);
  EXPECT_EQ(state.gradient_factor, 0.0625f);
}

TEST(BeginStep, KeepsTheLossScaleBetweenItsBounds) {
  const StepRule rule{
      .growth = 4.0, .backoff = 0.25, .growth_interval = 1, .min_scale = 2.0, .max_scale = 100.0};
  EXPECT_EQ(begun({.loss_scale = 64.0, .squared_norm = 1.0}, rule).loss_scale, 100.0);
  EXPECT_EQ(begun({.loss_scale = 4.0, .squared_norm = kNan}, rule).loss_scale, 2.0);
}

}  // namespace
}  // namespace fsdp::begin_step_test
