#include "fsdp/memory/arena/prefetch_plan.h"

#include <algorithm>
#include <array>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/memory/pool/slot_layout.h"

namespace fsdp {

namespace {

// The placement of a max_pool with the same prefetch: every stay of a unit in the lowest slot that
// is free throughout. Intervals are sorted by begin, so the slots needed are as many as units are
// live at once.
std::vector<int64_t> max_pool_offsets(const BucketTable& table, const LiveTrace& trace,
                                      const SlotOptions& options) {
  const SlotLayout layout = max_pool_layout(table, options);
  std::array<std::vector<int32_t>, kNumBucketRoles> busy_until;
  for (size_t role = 0; role < busy_until.size(); ++role) {
    busy_until[role].assign(static_cast<size_t>(options.num_slots[role]), -1);
  }
  std::vector<int64_t> offsets;
  int32_t group = -1;
  size_t slot = 0;
  for (const LiveInterval& interval : trace.intervals) {
    const BucketHome& home = layout.homes[static_cast<size_t>(table.index_of(interval.bucket))];
    const SlotEntry& entry = layout.entries[static_cast<size_t>(home.entry)];
    const auto role = static_cast<size_t>(entry.role);
    if (interval.group != group) {
      group = interval.group;
      const auto idle = std::find_if(busy_until[role].begin(), busy_until[role].end(),
                                     [&](int32_t until) { return until < interval.first; });
      FSDP_ASSERT(idle != busy_until[role].end(), "no slot for ", table.text(interval.bucket));
      *idle = interval.last;
      slot = static_cast<size_t>(idle - busy_until[role].begin());
    }
    const int64_t role_offset = role == 0 ? 0 : options.num_slots[0] * layout.slot_bytes[0];
    offsets.push_back(role_offset + static_cast<int64_t>(slot) * layout.slot_bytes[role] +
                      entry.offset);
  }
  return offsets;
}

std::string arena_bytes_words(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::string depth_words(int32_t prefetch) {
  if (prefetch == 0) return "no prefetch (gathers are not hidden)";
  return concat("a prefetch of ", prefetch, prefetch == 1 ? " unit" : " units");
}

}  // namespace

ArenaPlan plan_prefetch(const BucketTable& table, const StepOrder& order, int32_t prefetch,
                        const ArenaPlannerOptions& options) {
  const LiveTrace trace = zero3_trace(table, order, prefetch);
  ArenaPlannerOptions with_known = options;
  with_known.known_offsets =
      max_pool_offsets(table, trace,
                       {.num_slots = num_slots_for(table, trace, prefetch, /*gradient_slots=*/2),
                        .alignment = options.alignment});
  return plan_arena(trace, with_known);
}

BudgetedPlan deepest_prefetch(const BucketTable& table, const StepOrder& order,
                              int64_t budget_bytes, const ArenaPlannerOptions& options) {
  // The bound grows with the depth and is quickly computed, so it says where to begin; from there
  // downwards the first arena that fits is the deepest one.
  const auto num_uses = static_cast<int32_t>(order.forward.size() + order.backward.size());
  const int32_t deepest = std::max(num_uses - 1, 0);  // deeper, nothing changes any more
  int32_t prefetch = 0;
  int64_t too_much = 0;  // bytes the next depth needs at least; 0: there is none
  while (prefetch < deepest && too_much == 0) {
    const int64_t bound = lower_bound_bytes(zero3_trace(table, order, prefetch + 1));
    if (bound > budget_bytes) {
      too_much = bound;
    } else {
      ++prefetch;
    }
  }
  BudgetedPlan chosen{prefetch, plan_prefetch(table, order, prefetch, options), ""};
  while (chosen.plan.arena_bytes > budget_bytes && chosen.prefetch > 0) {
    too_much = chosen.plan.arena_bytes;
    --chosen.prefetch;
    chosen.plan = plan_prefetch(table, order, chosen.prefetch, options);
  }
  const int64_t needed = chosen.plan.arena_bytes;
  FSDP_CHECK(needed <= budget_bytes, "pool_budget_bytes is ", budget_bytes,
             ", too small for the planned pool: even with no prefetch it needs ", needed,
             " bytes (", arena_bytes_words(needed), "); raise it to that, or make units smaller");
  chosen.text =
      concat(depth_words(chosen.prefetch), " fits the budget of ", arena_bytes_words(budget_bytes),
             ": the arena takes ", arena_bytes_words(needed), "; ",
             too_much > 0
                 ? concat(chosen.prefetch + 1, " would need at least ", arena_bytes_words(too_much))
                 : std::string("it cannot be deeper"));
  return chosen;
}

}  // namespace fsdp
