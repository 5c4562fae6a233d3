// The tokens of a sequence where nobody says how many: --sequence and --documents are auto.
#pragma once

#include "fsdp/plan/forecast.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// By the data: rows that tune loaded weights are packed whole, and 99 % of them fit.
void choose_sequence(RunPlan& plan);

// By memory: halves what was chosen until a step fits into the device. Sets the plan's peak, if it
// is known.
void fit_sequence(RunPlan& plan, const Planner& planner, const RankDevice& device);

}  // namespace fsdp::train
