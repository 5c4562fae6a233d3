// What a rank takes to update a group of parameters, in microseconds of a table of measured rates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/rate_table.h"

namespace fsdp {

// Of elements that lie where the model computes.
double update_us(const GroupTypes& types, int64_t numel, const RateTable& rates);

// Of elements on the host: gradients come down and weights go up beside the updates.
double offloaded_update_us(const GroupTypes& types, int64_t numel, const RateTable& rates);

// Codes of the rank's `numel` elements after their update; 0 where nothing is quantised.
double codes_us(const GroupPlan& group, int64_t numel, const RateTable& rates);

// Muon's update of one matrix: passes over its elements, and five iterations of products.
double matrix_us(const OwnedMatrix& matrix, const GroupTypes& types, DType products,
                 const RateTable& rates);

// What the owners of matrices take. A unit can be gathered when the last of them is done with it.
struct MatrixTimes {
  std::vector<double> units;    // how much later than the unit before
  double most_of_a_rank = 0.0;  // matrices, as a share of all
};
MatrixTimes matrix_times(std::span<const GroupPlan> groups, const PlanOptions& options,
                         size_t num_units, const RateTable& rates);

}  // namespace fsdp
