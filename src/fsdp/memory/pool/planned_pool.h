// A pool that hands out the offsets of an arena plan, in the order of the plan.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/memory/arena/arena_planner.h"
#include "fsdp/memory/bucket.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/live_trace.h"

namespace fsdp {

// The n-th acquire of a bucket in a step gets the offset of its n-th interval in the plan. Acquires
// and releases need not come at the planned times: an address is refused only while a live bucket
// really holds bytes of it.
std::unique_ptr<BucketPool> make_planned_pool(BucketTable table, ArenaPlan plan, int64_t alignment,
                                              SlabAllocator& allocator);

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
