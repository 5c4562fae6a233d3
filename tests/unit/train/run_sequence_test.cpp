// Sequences that nobody gave a length are shortened until a step fits into the memory of a GPU.
#include "fsdp/train/run_sequence.h"

#include <gtest/gtest.h>

#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/model_tensors.h"

namespace fsdp::train::run_sequence_test {
namespace {

constexpr RankDevice kGpu{.device = DeviceChoice::kCuda, .compute = DType::kBFloat16};

// A run whose data wants sequences of `wanted`, on one GPU.
RunPlan fitted(int64_t wanted, RankDevice device, const TrainOptions& given = {}) {
  RunPlan plan;
  plan.given = plan.options = given;
  plan.options.sequence = wanted;
  const Planner planner(build_model("llama-1b", find_preset("llama-1b")->config),
                        plan_options(plan.options, 1, device.compute));
  plan.forecast = planner.forecast();
  fit_sequence(plan, planner, device);
  return plan;
}

RankDevice with_room_for(int64_t sequence) {
  RankDevice device = kGpu;
  // A twentieth is left free; one in a thousand is for the division.
  device.memory_bytes = fitted(sequence, kGpu).peak->total() / 19 * 20 / 1000 * 1001;
  return device;
}

TEST(FitSequence, HalvesWhatWasChosenUntilAStepFits) {
  EXPECT_EQ(fitted(4000, kGpu).options.sequence, 4000) << "no memory is known";
  const RankDevice device = with_room_for(1000);
  const RunPlan plan = fitted(4000, device);
  EXPECT_EQ(plan.options.sequence, 512) << "half of 4000 is 2048 in whole 64s, then 1024, then 512";
  EXPECT_EQ(plan.peak->total(), fitted(512, kGpu).peak->total());
  EXPECT_TRUE(plan.sequence_reason.starts_with("for a step within the ")) << plan.sequence_reason;
  EXPECT_EQ(fitted(960, device).options.sequence, 960) << "it fits";
}

TEST(FitSequence, KeepsWhatAPersonGaveAndTheUsualLength) {
  TrainOptions given;
  given.sequence = 4000;
  EXPECT_EQ(fitted(4000, with_room_for(1000), given).options.sequence, 4000);
  RankDevice tiny = kGpu;
  tiny.memory_bytes = 1;
  EXPECT_EQ(fitted(4000, tiny).options.sequence, 128) << "then a warning says what does not fit";
}

TEST(FitSequence, LeavesRunsOnTheHostAlone) {
  RankDevice host{.compute = DType::kBFloat16, .memory_bytes = 1};
  EXPECT_EQ(fitted(4000, host).options.sequence, 4000);
  EXPECT_FALSE(fitted(4000, host).peak);
}

}  // namespace
}  // namespace fsdp::train::run_sequence_test
