// The schedule of passes: its place, its expectations, and the order it learns.
#include "fsdp/shard/engine/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::schedule_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const std::vector<std::string> kNames = {"a", "b", "c"};

Schedule three_units(int32_t prefetch) {
  Schedule plan({true, true, true}, prefetch);
  plan.expect(mirrored_order({0, 1, 2}), nullptr);
  return plan;
}

std::vector<int32_t> units_of(std::span<const GatherPlan::Gather> gathers) {
  std::vector<int32_t> units;
  for (const GatherPlan::Gather& gather : gathers) units.push_back(gather.unit);
  return units;
}

// Units that neither nest nor overlap.
std::vector<std::vector<int32_t>> run(Schedule& plan, const std::vector<int32_t>& forward,
                                      const std::vector<int32_t>& backward) {
  std::vector<std::vector<int32_t>> gathered;
  plan.open(Schedule::Kind::kTraining);
  const auto use = [&](int32_t unit, Phase phase) {
    const int32_t time = plan.begin(unit, phase);
    gathered.push_back(units_of(plan.gathers_now()));
    plan.end(time);
  };
  for (const int32_t unit : forward) use(unit, Phase::kForward);
  for (const int32_t unit : backward) use(unit, Phase::kBackward);
  return gathered;
}

TEST(Schedule, GathersOneUnitAheadOfTheOneThatComputes) {
  Schedule plan = three_units(1);
  EXPECT_THAT(run(plan, {0, 1, 2}, {2, 1, 0}),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2), IsEmpty(), ElementsAre(1),
                          ElementsAre(0), IsEmpty()));
  EXPECT_TRUE(plan.follows());
  EXPECT_EQ(plan.close(kNames), std::nullopt) << "it was as expected";
}

TEST(Schedule, WithoutPrefetchGathersEachUnitWhenItBegins) {
  Schedule plan = three_units(0);
  EXPECT_THAT(run(plan, {0, 1, 2}, {2, 1, 0}),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2), IsEmpty(), ElementsAre(1),
                          ElementsAre(0)));
}

TEST(Schedule, LearnsTheOrderOfItsFirstTrainingPass) {
  Schedule plan = three_units(1);
  run(plan, {2, 0, 1}, {1, 0, 2});
  EXPECT_FALSE(plan.follows());
  const std::optional<StepOrder> learned = plan.close(kNames);
  ASSERT_TRUE(learned.has_value());
  EXPECT_THAT(learned->forward, ElementsAre(2, 0, 1));
  EXPECT_THAT(learned->backward, ElementsAre(1, 0, 2));
  EXPECT_THAT(learned->ends, IsEmpty()) << "nothing was nested";
}

TEST(Schedule, AfterASurpriseGathersNothingAheadUntilTheNextPass) {
  Schedule plan = three_units(1);
  run(plan, {0, 1, 2}, {2, 1, 0});
  plan.close(kNames);
  EXPECT_THAT(run(plan, {0, 2}, {2, 0}),
              ElementsAre(ElementsAre(0, 1), IsEmpty(), IsEmpty(), IsEmpty()));
  EXPECT_EQ(plan.close(kNames), std::nullopt) << "once is no new order";
  EXPECT_THAT(run(plan, {0, 1}, {})[1], ElementsAre(2)) << "the known order is expected again";
}

TEST(Schedule, AdoptsANewOrderThatComesTwiceInARow) {
  Schedule plan = three_units(1);
  run(plan, {0, 1, 2}, {2, 1, 0});
  plan.close(kNames);
  run(plan, {0, 2}, {2, 0});
  plan.close(kNames);
  run(plan, {0, 2}, {2, 0});
  const std::optional<StepOrder> learned = plan.close(kNames);
  ASSERT_TRUE(learned.has_value());
  EXPECT_THAT(learned->forward, ElementsAre(0, 2));
}

TEST(Schedule, AForwardWithoutBackwardTeachesNothing) {
  Schedule plan = three_units(1);
  run(plan, {2, 1, 0}, {});
  EXPECT_EQ(plan.close(kNames), std::nullopt);
}

TEST(Schedule, AForwardThatBeginsAgainAfterAWholeOneIsAnotherPass) {
  Schedule plan = three_units(1);
  run(plan, {0, 1}, {});
  EXPECT_FALSE(plan.would_start_anew(0)) << "the forward was not whole";
  run(plan, {0, 1, 2}, {});
  EXPECT_TRUE(plan.would_start_anew(0));
  EXPECT_FALSE(plan.would_start_anew(1));
  run(plan, {0, 1, 2}, {2});
  EXPECT_FALSE(plan.would_start_anew(0)) << "its backward has begun";
}

TEST(Schedule, AFirstUnitThatIsUsedAgainGoesOnWithItsForward) {
  Schedule plan = three_units(1);  // the embedding, a prediction layer, the head
  run(plan, {0, 2, 2}, {});
  EXPECT_FALSE(plan.would_start_anew(0)) << "the prediction layer is to come";
  for (const int32_t unit : {0, 1, 2}) plan.end(plan.begin(unit, Phase::kForward));
  EXPECT_TRUE(plan.would_start_anew(0)) << "every unit had its turn";
}

TEST(Schedule, WithoutGradientsLetsTheLastUnitGo) {
  Schedule plan = three_units(1);
  plan.open(Schedule::Kind::kInference);
  plan.begin(0, Phase::kForward);
  plan.begin(1, Phase::kForward);
  EXPECT_THAT(units_of(plan.gathers_now()), ElementsAre(2));
  EXPECT_EQ(plan.gathers_now().front().last, 2) << "and not until the backward";
}

TEST(StepRecorder, SaysHowUsesAreNested) {
  StepRecorder recorder;
  const int32_t outer = recorder.begin(1, Phase::kForward);
  const int32_t inner = recorder.begin(0, Phase::kForward);
  recorder.end(inner);
  recorder.end(outer);
  const int32_t back = recorder.begin(1, Phase::kBackward);
  recorder.end(back);
  const StepOrder order = recorder.order();
  EXPECT_THAT(order.forward, ElementsAre(1, 0));
  EXPECT_THAT(order.backward, ElementsAre(1));
  EXPECT_THAT(order.ends, ElementsAre(1, 1, 2));
}

TEST(StepRecorder, CountsAForwardInsideABackwardAsPartOfIt) {
  StepRecorder recorder;
  recorder.end(recorder.begin(0, Phase::kForward));
  recorder.end(recorder.begin(1, Phase::kForward));
  recorder.end(recorder.begin(1, Phase::kBackward));
  recorder.end(recorder.begin(0, Phase::kForward));  // recomputed
  recorder.end(recorder.begin(0, Phase::kBackward));
  EXPECT_THAT(recorder.order().forward, ElementsAre(0, 1));
  EXPECT_THAT(recorder.order().backward, ElementsAre(1, 0, 0));
}

TEST(StepRecorder, GivesAnOuterUseTheEndOfWhatOutlivesIt) {
  StepRecorder recorder;
  const int32_t first = recorder.begin(0, Phase::kForward);
  const int32_t second = recorder.begin(1, Phase::kForward);
  recorder.end(first);
  recorder.begin(2, Phase::kForward);
  recorder.end(second);
  EXPECT_THAT(recorder.order().ends, ElementsAre(2, 2, 2));
}

}  // namespace
}  // namespace fsdp::schedule_test
