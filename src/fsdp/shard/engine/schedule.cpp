#include "fsdp/shard/engine/schedule.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

bool holds_weights(const BucketPool& pool) {
  const BucketTable& table = pool.table();
  for (int32_t i = 0; i < table.num_buckets(); ++i)
    if (table.bucket(i).role == BucketRole::kWeight) return true;
  return false;
}

std::string first_difference(const StepOrder& expected, const StepOrder& seen,
                             std::span<const std::string> names) {
  const auto joined = [](const StepOrder& order) {
    std::vector<int32_t> uses = order.forward;
    uses.insert(uses.end(), order.backward.begin(), order.backward.end());
    return uses;
  };
  const std::vector<int32_t> a = joined(expected);
  const std::vector<int32_t> b = joined(seen);
  const auto name = [&](const std::vector<int32_t>& uses, size_t i) {
    return i < uses.size() ? concat("'", names[static_cast<size_t>(uses[i])], "'")
                           : std::string("nothing");
  };
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i)
    if (i >= a.size() || i >= b.size() || a[i] != b[i])
      return concat("use ", i + 1, " was ", name(b, i), " and used to be ", name(a, i));
  return "units ended at other times";
}

}  // namespace

// --- when to gather ---

GatherPlan::GatherPlan(const StepOrder& order, const LiveTrace& trace, const BucketTable& table)
    : uses_(order.forward), num_forward_(static_cast<int32_t>(order.forward.size())) {
  uses_.insert(uses_.end(), order.backward.begin(), order.backward.end());
  gathers_.resize(uses_.size());
  for (const LiveInterval& stay : trace.intervals) {
    if (table.bucket(stay.bucket).role != BucketRole::kWeight) continue;
    std::vector<Gather>& gathers = gathers_[static_cast<size_t>(stay.first)];
    // A unit's buckets are gathered together.
    const bool is_there = std::any_of(gathers.begin(), gathers.end(), [&](const Gather& gather) {
      return gather.unit == stay.bucket.unit;
    });
    if (!is_there) gathers.push_back({stay.bucket.unit, stay.last});
  }
}

GatherPlan GatherPlan::without_pool(const StepOrder& order, const std::vector<bool>& scheduled,
                                    int32_t prefetch) {
  std::vector<UnitBuckets> units;
  for (size_t i = 0; i < scheduled.size(); ++i) {
    units.push_back({concat(i), {}});
    if (scheduled[i])
      units.back().buckets.push_back({.name = "weight", .bytes = 1, .dtype = DType::kUInt8});
  }
  const BucketTable table(std::move(units));
  return {order, zero3_trace(table, order, prefetch), table};
}

void StepRecorder::reset() {
  uses_.clear();
  ends_.clear();
  num_forward_ = 0;
}

int32_t StepRecorder::begin(int32_t unit, Phase phase) {
  const bool still_forward = num_forward_ == static_cast<int32_t>(uses_.size());
  uses_.push_back(unit);
  ends_.push_back(-1);
  // A forward after the beginning of a backward is part of the backward.
  if (phase == Phase::kForward && still_forward) ++num_forward_;
  return now();
}

void StepRecorder::end(int32_t time) { ends_[static_cast<size_t>(time)] = now(); }

StepOrder StepRecorder::order() const {
  StepOrder order;
  order.forward.assign(uses_.begin(), uses_.begin() + num_forward_);
  order.backward.assign(uses_.begin() + num_forward_, uses_.end());
  order.ends = ends_;
  for (int32_t& end : order.ends)
    if (end < 0) end = now();
  for (size_t i = order.ends.size(); i-- > 0;)
    for (int32_t inner = static_cast<int32_t>(i) + 1; inner <= order.ends[i]; ++inner)
      order.ends[i] = std::max(order.ends[i], order.ends[static_cast<size_t>(inner)]);
  const bool nests = std::any_of(order.ends.begin(), order.ends.end(), [&](const int32_t& end) {
    return end != static_cast<int32_t>(&end - order.ends.data());
  });
  if (!nests) order.ends.clear();
  return order;
}

// --- where we are ---

bool operator==(const StepOrder& a, const StepOrder& b) {
  return a.forward == b.forward && a.backward == b.backward && a.ends == b.ends;
}

Schedule::Schedule(std::vector<bool> scheduled, int32_t prefetch)
    : scheduled_(std::move(scheduled)), prefetch_(prefetch) {}

void Schedule::expect(StepOrder order, const BucketPool* pool) {
  FSDP_ASSERT(kind_ == Kind::kNone);
  const bool pooled = pool != nullptr && holds_weights(*pool);
  training_ = pooled ? GatherPlan(order, pool->trace(), pool->table())
                     : GatherPlan::without_pool(order, scheduled_, prefetch_);
  StepOrder forward{order.forward, {}, {}};
  if (!order.ends.empty()) {
    forward.ends.assign(order.ends.begin(),
                        order.ends.begin() + static_cast<int64_t>(order.forward.size()));
    const auto last = static_cast<int32_t>(order.forward.size()) - 1;
    for (int32_t& end : forward.ends) end = std::min(end, last);
  }
  const int32_t prefetch = pooled ? pool->trace().prefetch : prefetch_;
  inference_ = GatherPlan::without_pool(forward, scheduled_, prefetch);
  order_ = std::move(order);
}

void Schedule::open(Kind kind) {
  kind_ = kind;
  follows_ = true;
  recorder_.reset();
}

std::optional<StepOrder> Schedule::close(std::span<const std::string> names) {
  const Kind closed = std::exchange(kind_, Kind::kNone);
  if (closed != Kind::kTraining || !recorder_.has_backward()) return std::nullopt;
  StepOrder seen = recorder_.order();
  const bool was_recorded = std::exchange(is_recorded_, true);
  if (seen == order_) {
    surprise_.reset();
    return std::nullopt;
  }
  if (!was_recorded) return seen;
  if (!std::exchange(is_reported_, true))
    log(LogLevel::kWarning, "the order of units changed (", first_difference(order_, seen, names),
        "); it is followed, but such steps gather without looking ahead");
  if (surprise_ && *surprise_ == seen) {
    surprise_.reset();
    return seen;
  }
  surprise_ = std::move(seen);
  return std::nullopt;
}

bool Schedule::would_start_anew(int32_t unit) const {
  return unit == plan().first_unit() && !recorder_.has_backward() && had_whole_forward();
}

// In an unknown order, a forward is whole when every unit had its turn. Before that, an embedding
// that is called again is used by a layer that is still to come.
bool Schedule::had_whole_forward() const {
  if (follows_) return recorder_.num_forward() >= plan().num_forward();
  return std::all_of(order_.forward.begin(), order_.forward.end(),
                     [&](int32_t unit) { return recorder_.has_used(unit); });
}

int32_t Schedule::begin(int32_t unit, Phase phase) {
  const int32_t time = recorder_.begin(unit, phase);
  follows_ = follows_ && plan().expects(time, unit, phase);
  return time;
}

std::span<const GatherPlan::Gather> Schedule::gathers_now() const {
  if (!follows_) return {};
  return plan().gathers_at(now());
}

}  // namespace fsdp
