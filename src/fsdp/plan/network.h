// The cost of a step to the network of a cluster: bytes on each kind of link, launches,
// connections, and the memory that NCCL takes for them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"

namespace fsdp {

// A step has one microbatch, and weights are gathered `num_gathers` times in it, by unit. Its bytes
// do not have those that layers exchange over ep and tp.
NetworkForecast forecast_network(std::span<const GroupPlan> groups, const PlanOptions& options,
                                 std::span<const int64_t> num_gathers);

}  // namespace fsdp
