// What the bucket pool of one rank will take, and how often it makes a unit gather its weights.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/plan/group_plan.h"

namespace fsdp {

struct PoolForecast {
  // What gathered weights alone need.
  int64_t weight_bytes = 0;
  // What unreduced gradients add to that, and the slots of casts before the last reductions.
  int64_t grad_bytes = 0;
  // The depth of the plan: as asked for, or the deepest that fits the budget.
  int64_t prefetch = 0;
  // By unit, in one step; 0 where weights are not sharded.
  std::vector<int64_t> num_gathers;
};

PoolForecast forecast_pool(const ModelShape& model, std::span<const GroupPlan> groups,
                           const PlanOptions& options);

}  // namespace fsdp
