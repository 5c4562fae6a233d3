// Where a run runs: what its log and report keep, so that figures can be compared later.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "fsdp/comm/launch.h"
#include "fsdp/train/run_facts.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

std::vector<EnvironmentRow> environment_rows(const Launch& launch, const RunPlan& plan,
                                             c10::Device device);

}  // namespace fsdp::train
