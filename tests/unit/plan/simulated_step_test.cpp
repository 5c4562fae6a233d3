// The clock of a step against schedules that were worked out by hand. All times are small whole
// numbers, whose sums are exact.
#include "fsdp/plan/simulated_step.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::simulated_step_test {
namespace {

// Three units of equal times; forward 10, backward 20.
StepTimes three_units(const UnitTimes& each) {
  StepTimes times{.units = {}, .order = mirrored_order({0, 1, 2})};
  for (const char* name : {"a", "b", "c"}) {
    times.units.push_back(each);
    times.units.back().name = name;
  }
  return times;
}

const StepSpan& find(const SimulatedStep& step, StepRow row, const std::string& label) {
  for (const StepSpan& span : step.spans)
    if (span.row == row && span.label == label) return span;
  ADD_FAILURE() << "no span " << label;
  return step.spans.front();
}

TEST(SimulatedStep, OneRankComputesAndUpdatesOneAfterTheOther) {
  StepTimes times = three_units({.name = {}, .forward = 10, .backward = 20, .update = 5});
  times.between = 2;
  const SimulatedStep step = simulate(times);
  EXPECT_EQ(step.us, 3 * 30 + 2 + 3 * 5);
  EXPECT_EQ(step.compute, 90);
  EXPECT_EQ(step.update, 17);
  EXPECT_EQ(step.exposed_update, 17);
  EXPECT_EQ(step.gather + step.reduce + step.exposed_gather + step.exposed_reduce, 0);
}

// gather   |a a|b b|c c|          |b b|a a|
// compute      | a | b | c |  c   | b ...
TEST(SimulatedStep, HidesGathersBehindTheUnitBefore) {
  // The first gather of a step has nothing before it; the last unit stays whole.
  const SimulatedStep step =
      simulate(three_units({.name = {}, .forward = 10, .backward = 20, .gather = 8}));
  EXPECT_EQ(step.gather, 5 * 8);
  EXPECT_EQ(step.exposed_gather, 8);
  EXPECT_EQ(step.us, 8 + 90);
}

TEST(SimulatedStep, WaitsForGathersThatAreLongerThanAUnit) {
  // Forward: a is gathered for 15 and computes from 15. b's gather begins when a's is done, at 15,
  // and ends at 30; c's begins when b's use begins, at 30, and ends at 45. Backward of c needs no
  // gather; b's begins with it, at 55, and is hidden; so is a's.
  const SimulatedStep step =
      simulate(three_units({.name = {}, .forward = 10, .backward = 20, .gather = 15}));
  EXPECT_EQ(find(step, StepRow::kCompute, "b forward").begin, 30);
  EXPECT_EQ(find(step, StepRow::kCompute, "c forward").begin, 45);
  EXPECT_EQ(find(step, StepRow::kCompute, "c backward").begin, 55);
  EXPECT_EQ(step.exposed_gather, 15 + 5 + 5);
  EXPECT_EQ(step.us, 90 + 25);
}

TEST(SimulatedStep, GathersInTurnWithoutPrefetch) {
  StepTimes times = three_units({.name = {}, .forward = 10, .backward = 20, .gather = 15});
  times.prefetch = 0;
  const SimulatedStep step = simulate(times);
  EXPECT_EQ(step.exposed_gather, 5 * 15);
  EXPECT_EQ(step.us, 90 + 75);
}

TEST(SimulatedStep, WaitsForTheReductionOfTheUnitBefore) {
  // c's backward ends at 50, its reduction at 80. b's ends at 70 and waits until 80 for c's memory;
  // its own reduction is then done at 110. a computes from 80 to 100 and waits for it until 110;
  // its own is done at 140.
  const SimulatedStep step =
      simulate(three_units({.name = {}, .forward = 10, .backward = 20, .reduce = 30}));
  EXPECT_EQ(find(step, StepRow::kCompute, "b backward").end, 70);
  EXPECT_EQ(find(step, StepRow::kCompute, "a backward").begin, 80);
  EXPECT_EQ(step.us, 140);
  EXPECT_EQ(step.exposed_reduce, 50);
}

TEST(SimulatedStep, ReducesOnceInAStepWhereGradientsStayPartial) {
  StepTimes times = three_units({.name = {}, .forward = 10, .backward = 20, .reduce_at_end = 12});
  times.microbatches = 2;
  const SimulatedStep step = simulate(times);
  EXPECT_EQ(step.reduce, 3 * 12);
  EXPECT_EQ(step.exposed_reduce, 12);
  EXPECT_EQ(step.us, 2 * 90 + 12);
}

TEST(SimulatedStep, ReducesOverTheOuterAxisAfterTheInnerOne) {
  // One row of both: inner reductions end at 62, 99 and 136, and outer ones of 25 follow each.
  const SimulatedStep step = simulate(three_units(
      {.name = {}, .forward = 10, .backward = 20, .reduce = 12, .reduce_over_outer = 25}));
  EXPECT_EQ(find(step, StepRow::kReduce, "a over the outer axis").begin, 136);
  EXPECT_EQ(step.us, 161);
}

TEST(SimulatedStep, GathersUpdatedWeightsOnceInAStep) {
  StepTimes times = three_units({.name = {}, .forward = 10, .backward = 20, .refresh = 8});
  times.microbatches = 2;
  const SimulatedStep step = simulate(times);
  EXPECT_EQ(step.gather, 3 * 8);
  EXPECT_EQ(step.us, 2 * 90 + 8);
}

TEST(SimulatedStep, HidesUpdatesBesideTheNextForwardWhereItCan) {
  // The first of the updates, 4, 8 and 12 after the step's end, is in the way: b's weights are
  // there at 8, and a computes from 4 to 14.
  StepTimes times = three_units({.name = {}, .forward = 10, .backward = 20, .update = 4});
  times.updates_beside = true;
  const SimulatedStep step = simulate(times);
  EXPECT_EQ(step.exposed_update, 4);
  EXPECT_EQ(step.us, 94);
}

TEST(SimulatedStep, WaitsForWeightsThatTheHostUpdates) {
  // They come after 25, 50 and 75 of the next step; a unit computes for 10.
  const SimulatedStep step =
      simulate(three_units({.name = {}, .forward = 10, .backward = 20, .offload = 25}));
  EXPECT_EQ(step.exposed_update, 25 + 15 + 15);
  EXPECT_EQ(step.us, 90 + 55);
}

// The host asks for a step when it has seen the last backward of the one before, of 20.
TEST(SimulatedStep, IsAsLongAsTheHostWhereThatIsSlower) {
  StepTimes times = three_units(
      {.name = {}, .forward = 10, .backward = 20, .host_forward = 30, .host_backward = 40});
  const SimulatedStep step = simulate(times);
  EXPECT_EQ(step.us, 3 * 70 + 20);
  EXPECT_EQ(step.exposed_host, step.us - step.compute);
  times.host_update = 100;  // 20 of it pass while the last backward runs
  EXPECT_EQ(simulate(times).us, 3 * 70 + 100);
}

}  // namespace
}  // namespace fsdp::simulated_step_test
