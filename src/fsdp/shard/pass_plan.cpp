#include "fsdp/shard/pass_plan.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/error.h"
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

bool operator==(const StepOrder& a, const StepOrder& b) {
  return a.forward == b.forward && a.backward == b.backward && a.ends == b.ends;
}

PassPlan::PassPlan(std::vector<bool> scheduled, int32_t prefetch)
    : scheduled_(std::move(scheduled)), prefetch_(prefetch) {}

void PassPlan::expect(StepOrder order, const BucketPool* pool) {
  FSDP_ASSERT(kind_ == Kind::kNone);
  const bool pooled = pool != nullptr && holds_weights(*pool);
  training_ = pooled ? StepSchedule(order, pool->trace(), pool->table())
                     : StepSchedule::without_pool(order, scheduled_, prefetch_);
  StepOrder forward{order.forward, {}, {}};
  if (!order.ends.empty()) {
    forward.ends.assign(order.ends.begin(),
                        order.ends.begin() + static_cast<int64_t>(order.forward.size()));
    const auto last = static_cast<int32_t>(order.forward.size()) - 1;
    for (int32_t& end : forward.ends) end = std::min(end, last);
  }
  const int32_t prefetch = pooled ? pool->trace().prefetch : prefetch_;
  inference_ = StepSchedule::without_pool(forward, scheduled_, prefetch);
  order_ = std::move(order);
}

void PassPlan::open(Kind kind) {
  kind_ = kind;
  follows_ = true;
  recorder_.clear();
}

std::optional<StepOrder> PassPlan::close(std::span<const std::string> names) {
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

bool PassPlan::would_start_anew(int32_t unit) const {
  return unit == schedule().first_unit() && !recorder_.has_backward() && had_whole_forward();
}

// In an order of its own, a forward is whole when every unit had its turn. Before that, an
// embedding that is called again is used once more by a layer that is to come.
bool PassPlan::had_whole_forward() const {
  if (follows_) return recorder_.num_forward() >= schedule().num_forward();
  return std::all_of(order_.forward.begin(), order_.forward.end(),
                     [&](int32_t unit) { return recorder_.has_used(unit); });
}

int32_t PassPlan::begin(int32_t unit, Phase phase) {
  const int32_t time = recorder_.begin(unit, phase);
  follows_ = follows_ && schedule().expects(time, unit, phase);
  return time;
}

std::span<const StepSchedule::Gather> PassPlan::gathers_now() const {
  if (!follows_) return {};
  return schedule().gathers_at(now());
}

}  // namespace fsdp
