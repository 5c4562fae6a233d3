// Agreement of a run's ranks that they train on one and the same undamaged data.
#pragma once

#include "fsdp/comm/mesh.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// Catches hosts that have different files under the same name, by their headers. All ranks throw if
// one differs from rank 0.
void compare_data(const RunPlan& plan, const Mesh& mesh);

// Waits until every rank has verified its own copy, and so that they are equal. All ranks throw if
// one is damaged. Comes before anything is published that was trained on it.
void confirm_data(const RunPlan& plan, const Mesh& mesh);

}  // namespace fsdp::train
