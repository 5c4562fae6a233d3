// From a model's units and order to an arena: for a given prefetch depth, or the deepest that fits.
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/memory/arena/arena_planner.h"
#include "fsdp/memory/bucket.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

// Weights and gradients in one arena. Never larger than a max_pool with the same prefetch, because
// its placement is among the candidates.
ArenaPlan plan_prefetch(const BucketTable& table, const StepOrder& order, int32_t prefetch,
                        const ArenaPlannerOptions& options = {});

struct BudgetedPlan {
  int32_t prefetch = 0;
  ArenaPlan plan;
  std::string text;  // one sentence: what fits, and what one unit more would need
};

// The deepest prefetch whose arena fits `budget_bytes`. When not even the units fit one at a time,
// an Error that says how many bytes they need.
BudgetedPlan deepest_prefetch(const BucketTable& table, const StepOrder& order,
                              int64_t budget_bytes, const ArenaPlannerOptions& options = {});

}  // namespace fsdp
