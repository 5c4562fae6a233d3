#include "fsdp/memory/pool/planned_pool.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/memory/pool/slot_pool.h"

namespace fsdp {

namespace {

struct ByteRange {
  int64_t begin;
  int64_t end;
};

bool overlap(const ByteRange& a, const ByteRange& b) { return a.begin < b.end && b.begin < a.end; }

class PlannedPool final : public BucketPool {
 public:
  PlannedPool(BucketTable declared, ArenaPlan plan, int64_t alignment,
              SlabAllocator& slab_allocator);

  PoolKind kind() const override { return PoolKind::kPlanned; }
  PoolBytes bytes() const override { return {.shared = plan_.arena_bytes}; }
  bool address_is_fixed(BucketId id) const override {
    table().index_of(id);  // throws for an unknown id
    return true;
  }
  std::string report() const override;

 private:
  struct Schedule {
    std::vector<ByteRange> stays;  // in the order of the plan
    int32_t num_begun = 0;         // in this step

    bool has_next() const { return num_begun < static_cast<int32_t>(stays.size()); }
    const ByteRange& next() const { return stays[static_cast<size_t>(num_begun)]; }
  };
  struct LiveBucket {
    ByteRange range;
    int32_t index;
  };
  // A live bucket that holds bytes of the range; null when there is none.
  const LiveBucket* live_within(const ByteRange& range) const {
    const auto live = std::find_if(live_.begin(), live_.end(), [&](const LiveBucket& each) {
      return overlap(range, each.range);
    });
    return live == live_.end() ? nullptr : &*live;
  }

  void reserve_memory() override { slab_ = Slab(allocator(), plan_.arena_bytes, alignment_); }
  void* take(BucketId id, int32_t index) override;
  bool can_take(BucketId, int32_t index) const override {
    const Schedule& schedule = schedules_[static_cast<size_t>(index)];
    return schedule.has_next() && live_within(schedule.next()) == nullptr;
  }
  void release_memory(BucketId, int32_t index) override {
    std::erase_if(live_, [&](const LiveBucket& each) { return each.index == index; });
  }
  void reset_step() override {
    for (Schedule& schedule : schedules_) schedule.num_begun = 0;
  }
  // Who lies where, for error messages.
  std::string state_text() const;

  ArenaPlan plan_;
  int64_t alignment_;
  std::vector<Schedule> schedules_;  // by flat index
  std::vector<LiveBucket> live_;     // few: two or three units
  Slab slab_;
};

PlannedPool::PlannedPool(BucketTable declared, ArenaPlan plan, int64_t alignment,
                         SlabAllocator& slab_allocator)
    : BucketPool(std::move(declared), plan.trace, slab_allocator),
      plan_(std::move(plan)),
      alignment_(alignment),
      schedules_(static_cast<size_t>(table().num_buckets())) {
  const std::vector<LiveInterval>& intervals = plan_.trace.intervals;
  for (size_t i = 0; i < intervals.size(); ++i) {
    const ByteRange range{plan_.offsets[i], plan_.offsets[i] + intervals[i].bytes};
    const int32_t index = table().index_of(intervals[i].bucket);
    schedules_[static_cast<size_t>(index)].stays.push_back(range);
  }
  live_.reserve(static_cast<size_t>(table().num_buckets()));  // so that acquire never allocates
}

void* PlannedPool::take(BucketId id, int32_t index) {
  Schedule& schedule = schedules_[static_cast<size_t>(index)];
  FSDP_CHECK(schedule.has_next(), table().text(id), " is acquired ", schedule.num_begun + 1,
             " times in one step but the plan has ", schedule.stays.size(),
             " stays for it; call begin_step() between steps, or plan again with the new order (",
             state_text(), ")");
  const ByteRange range = schedule.next();
  const LiveBucket* live = live_within(range);
  FSDP_CHECK(live == nullptr, table().text(id), " needs bytes ", range.begin, " to ", range.end,
             " of the arena, which ", table().text(table().id_of(live->index)),
             " still holds; keep the planned order, or plan again with the new one (", state_text(),
             ")");
  ++schedule.num_begun;
  live_.push_back({range, index});
  return slab_.at(range.begin);
}

std::string PlannedPool::state_text() const {
  if (live_.empty()) return "nothing is live in the arena";
  std::vector<std::string> parts;
  for (const LiveBucket& live : live_) {
    parts.push_back(concat(table().text(table().id_of(live.index)), " at ", live.range.begin,
                           " to ", live.range.end));
  }
  return concat("live in the arena: ", join(parts, ", "));
}

std::string PlannedPool::report() const {
  const double share = (plan_.ratio() - 1.0) * 100.0;
  std::string text = concat(
      "planned: one arena of ", bytes_text(static_cast<double>(plan_.arena_bytes)), ", prefetch ",
      plan_.trace.prefetch, "; all addresses are fixed\n  most live bytes at one time: ",
      bytes_text(static_cast<double>(plan_.bound_bytes)), "; the arena is ",
      std::round(share * 100.0) / 100.0, " % above it (found by: ", plan_.method, ")");
  if (plan_.num_delayed > 0) {
    text +=
        concat("\n  ", plan_.num_delayed,
               " prefetches begin one unit later than asked, because a peak could not be placed");
  }
  return text;
}

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

std::string depth_words(int32_t prefetch) {
  if (prefetch == 0) return "no prefetch (gathers are not hidden)";
  return concat("a prefetch of ", prefetch, prefetch == 1 ? " unit" : " units");
}

}  // namespace

std::unique_ptr<BucketPool> make_planned_pool(BucketTable table, ArenaPlan plan, int64_t alignment,
                                              SlabAllocator& allocator) {
  return std::make_unique<PlannedPool>(std::move(table), std::move(plan), alignment, allocator);
}

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
             " bytes (", bytes_text(needed), "); raise it to that, or make units smaller");
  chosen.text = concat(
      depth_words(chosen.prefetch), " fits the budget of ", bytes_text(budget_bytes),
      ": the arena takes ", bytes_text(needed), "; ",
      too_much > 0 ? concat(chosen.prefetch + 1, " would need at least ", bytes_text(too_much))
                   : std::string("it cannot be deeper"));
  return chosen;
}

}  // namespace fsdp
