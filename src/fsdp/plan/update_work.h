// What a rank takes to update a group of parameters, in microseconds of a table of measured rates.
#pragma once

#include <cstdint>

#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/rate_table.h"

namespace fsdp {

// Of elements that lie where the model computes.
double update_us(const GroupTypes& types, int64_t numel, const RateTable& rates);

// Of elements on the host: gradients come down and weights go up beside the updates.
double offloaded_update_us(const GroupTypes& types, int64_t numel, const RateTable& rates);

// Codes of the rank's `numel` elements after their update; 0 where nothing is quantised.
double codes_us(const GroupPlan& group, int64_t numel, const RateTable& rates);

}  // namespace fsdp
