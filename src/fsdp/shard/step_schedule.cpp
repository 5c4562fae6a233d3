#include "fsdp/shard/step_schedule.h"

#include <algorithm>

#include "fsdp/base/error.h"

namespace fsdp {

StepSchedule::StepSchedule(const StepOrder& order, const LiveTrace& trace, const BucketTable& table)
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

StepSchedule StepSchedule::without_pool(const StepOrder& order, const std::vector<bool>& scheduled,
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

void StepRecorder::clear() {
  uses_.clear();
  ends_.clear();
  num_forward_ = 0;
}

int32_t StepRecorder::begin(int32_t unit, Phase phase) {
  const bool still_forward = num_forward_ == static_cast<int32_t>(uses_.size());
  uses_.push_back(unit);
  ends_.push_back(-1);
  // A forward after a backward began is part of the backward.
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

}  // namespace fsdp
