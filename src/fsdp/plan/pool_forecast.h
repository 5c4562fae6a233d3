// The bytes that the bucket pool of one rank will take, and how often it makes a unit gather its
// weights.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/memory/live_trace.h"
#include "fsdp/plan/group_plan.h"

namespace fsdp {

struct PoolForecast {
  int64_t weight_bytes = 0;  // that gathered weights alone would need
  int64_t grad_bytes = 0;    // that unreduced gradients, and casts before the last reductions, add
  int64_t prefetch = 0;      // as asked for, or the deepest that fits the budget
  std::vector<int64_t> num_gathers;  // by unit, in one step; 0 where weights are not sharded
};

// The uses of a microbatch.
StepOrder step_order_of(const ModelShape& model);

PoolForecast forecast_pool(const ModelShape& model, std::span<const GroupPlan> groups,
                           const PlanOptions& options);

}  // namespace fsdp
