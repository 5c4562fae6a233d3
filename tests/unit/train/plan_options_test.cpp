// What the settings of a run ask of its plan.
#include <gtest/gtest.h>

#include "fsdp/train/run_plan.h"

namespace fsdp::train::plan_options_test {
namespace {

OtherUnits planned_other_units(const TrainOptions& options) {
  return plan_options(options, 4, DType::kBFloat16).other_units;
}

// As the engine does (registered_pool.h).
TEST(PlanOptionsOf, UserBuffersKeepTheMemoryOfUnlikeUnits) {
  TrainOptions options;
  options.pool = PoolKind::kDoubleBuffer;
  EXPECT_EQ(planned_other_units(options), OtherUnits::kOnDemand);
  for (const UserBuffers use : {UserBuffers::kRegistered, UserBuffers::kSymmetric}) {
    options.user_buffers = use;
    EXPECT_EQ(planned_other_units(options), OtherUnits::kPersistent) << name_of(use);
  }
  options.user_buffers = UserBuffers::kOff;
  options.other_units = OtherUnits::kPersistent;
  EXPECT_EQ(planned_other_units(options), OtherUnits::kPersistent);
}

}  // namespace
}  // namespace fsdp::train::plan_options_test
