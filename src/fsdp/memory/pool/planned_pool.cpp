#include "fsdp/memory/pool/planned_pool.h"

#include <algorithm>
#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

struct ByteRange {
  int64_t begin;
  int64_t end;
};

bool overlap(const ByteRange& a, const ByteRange& b) { return a.begin < b.end && b.begin < a.end; }

// Who held bytes of `range` last before interval `of` begins, going back to the end of the previous
// step: walks backwards in time and takes from the range what each earlier holder covers.
std::vector<BucketId> holders_before(const ArenaPlan& plan, const std::vector<size_t>& by_last,
                                     size_t of) {
  const std::vector<LiveInterval>& intervals = plan.trace.intervals;
  const auto range_of = [&](size_t i) {
    return ByteRange{plan.offsets[i], plan.offsets[i] + intervals[i].bytes};
  };
  std::vector<ByteRange> open = {range_of(of)};
  std::vector<BucketId> holders;
  const auto visit = [&](size_t i) {
    const ByteRange taken = range_of(i);
    std::vector<ByteRange> rest;
    bool touched = false;
    for (const ByteRange& piece : open) {
      if (!overlap(piece, taken)) {
        rest.push_back(piece);
        continue;
      }
      touched = true;
      if (piece.begin < taken.begin) rest.push_back({piece.begin, taken.begin});
      if (taken.end < piece.end) rest.push_back({taken.end, piece.end});
    }
    open = std::move(rest);
    const BucketId id = intervals[i].bucket;
    const bool is_new = std::find(holders.begin(), holders.end(), id) == holders.end();
    if (touched && is_new && id != intervals[of].bucket) holders.push_back(id);
  };
  for (const size_t i : by_last) {  // latest end first
    if (intervals[i].last < intervals[of].first) visit(i);
  }
  for (const size_t i : by_last) {
    if (open.empty()) break;
    if (intervals[i].last >= intervals[of].first) visit(i);  // in the previous step
  }
  return holders;
}

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
  std::span<const BucketId> previous_holders(BucketId id) const override {
    if (!is_held(id)) return {};
    return stay_of(table().index_of(id), 1).previous;
  }
  std::string report() const override;

 private:
  struct Stay {
    ByteRange range;
    std::vector<BucketId> previous;
  };
  struct Schedule {
    std::vector<Stay> stays;  // in the order of the plan
    int32_t num_begun = 0;    // in this step

    bool has_next() const { return num_begun < static_cast<int32_t>(stays.size()); }
    const ByteRange& next() const { return stays[static_cast<size_t>(num_begun)].range; }
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
  // The stay that begun `back` acquires ago: 1 is the current one.
  const Stay& stay_of(int32_t index, int32_t back) const {
    const Schedule& schedule = schedules_[static_cast<size_t>(index)];
    return schedule.stays[static_cast<size_t>(schedule.num_begun - back)];
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
  std::string state_text() const override;

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
  check_trace(plan_.trace, table());
  check_plan(plan_);
  const std::vector<LiveInterval>& intervals = plan_.trace.intervals;
  std::vector<size_t> by_last(intervals.size());
  for (size_t i = 0; i < by_last.size(); ++i) by_last[i] = i;
  std::stable_sort(by_last.begin(), by_last.end(),
                   [&](size_t a, size_t b) { return intervals[a].last > intervals[b].last; });
  for (size_t i = 0; i < intervals.size(); ++i) {
    const ByteRange range{plan_.offsets[i], plan_.offsets[i] + intervals[i].bytes};
    const int32_t index = table().index_of(intervals[i].bucket);
    schedules_[static_cast<size_t>(index)].stays.push_back(
        {range, holders_before(plan_, by_last, i)});
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
      "planned: one arena of ", bytes_text(static_cast<double>(plan_.arena_bytes)),
      plan_.trace.prefetch >= 0 ? concat(", prefetch ", plan_.trace.prefetch) : std::string(),
      "; all addresses are fixed\n  most live bytes at one time: ",
      bytes_text(static_cast<double>(plan_.bound_bytes)), "; the arena is ",
      std::round(share * 100.0) / 100.0, " % above it (found by: ", plan_.method, ")");
  if (plan_.num_delayed > 0) {
    text +=
        concat("\n  ", plan_.num_delayed,
               " prefetches begin one unit later than asked, because a peak could not be placed");
  }
  return text;
}

}  // namespace

std::unique_ptr<BucketPool> make_planned_pool(BucketTable table, ArenaPlan plan, int64_t alignment,
                                              SlabAllocator& allocator) {
  return std::make_unique<PlannedPool>(std::move(table), std::move(plan), alignment, allocator);
}

}  // namespace fsdp
