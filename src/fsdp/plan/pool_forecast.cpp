#include "fsdp/plan/pool_forecast.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/memory/bucket.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/pool/planned_pool.h"

namespace fsdp {

namespace {

std::vector<UnitBuckets> declare_buckets(const ModelShape& model, std::span<const GroupPlan> groups,
                                         const PlanOptions& options) {
  std::vector<UnitBuckets> units;
  for (const UnitShape& unit : model.units) units.push_back({unit.name, {}});
  for (const GroupPlan& group : groups) {
    GroupBuckets needed = group_buckets(group.layout, group.types, options.strategy, group.mesh,
                                        row_of(group.kind).name);
    std::vector<Bucket>& buckets = units[static_cast<size_t>(group.unit)].buckets;
    if (needed.weight) buckets.push_back(std::move(*needed.weight));
    if (needed.gradient) buckets.push_back(std::move(*needed.gradient));
  }
  return units;
}

std::vector<UnitBuckets> only_weights(std::vector<UnitBuckets> units) {
  for (UnitBuckets& unit : units)
    std::erase_if(unit.buckets, [](const Bucket& b) { return b.role != BucketRole::kWeight; });
  return units;
}

bool has_role(std::span<const UnitBuckets> units, BucketRole role) {
  return std::any_of(units.begin(), units.end(), [&](const UnitBuckets& unit) {
    return std::any_of(unit.buckets.begin(), unit.buckets.end(),
                       [&](const Bucket& bucket) { return bucket.role == role; });
  });
}

// The reductions that end a cycle (to the optimizer's placement) cast what a rank holds of a
// group's main gradients when they travel in another type: a slot for each of them, which fits any
// group.
int64_t cast_bytes(std::span<const GroupPlan> groups, const PlanOptions& options) {
  const PlacementPair gradient = options.strategy.gradient;
  const PlacementPair optimizer = options.strategy.optimizer;
  int64_t most_stages = 0;
  int64_t largest = 0;
  for (const GroupPlan& group : groups) {
    const int64_t num_stages = (gradient.inner != optimizer.inner && group.mesh.inner > 1 ? 1 : 0) +
                               (gradient.outer != optimizer.outer && group.mesh.outer > 1 ? 1 : 0);
    most_stages = std::max(most_stages, num_stages);
    if (num_stages > 0 && group.types.trainable && group.types.wire != group.types.main_grad)
      largest = std::max(largest, checked_mul(group.layout.max_shard_numel(gradient),
                                              element_bytes(group.types.wire)));
  }
  return checked_mul(largest, most_stages);
}

// The bytes that a pool would take. The pool is made only to be asked; it allocates nothing.
int64_t pool_bytes(std::vector<UnitBuckets> units, const PoolOptions& options) {
  HostSlabAllocator allocator;
  return make_bucket_pool(std::move(units), options, allocator)->bytes().total();
}

// Each stay of a unit's weights in memory begins with one gather.
std::vector<int64_t> count_gathers(const std::vector<UnitBuckets>& units, const StepOrder& order,
                                   int32_t prefetch) {
  std::vector<int64_t> num_gathers(units.size(), 0);
  const BucketTable table(units);
  for (const LiveInterval& stay : zero3_trace(table, order, prefetch).intervals) {
    const bool first_of_role =
        table.bucket(stay.bucket).role == BucketRole::kWeight && stay.bucket.bucket == 0;
    if (first_of_role) ++num_gathers[static_cast<size_t>(stay.bucket.unit)];
  }
  return num_gathers;
}

int32_t depth_within_budget(const std::vector<UnitBuckets>& units, const PoolOptions& options) {
  try {
    return deepest_prefetch(BucketTable(units), options.order, options.budget_bytes,
                            {.alignment = options.alignment})
        .prefetch;
  } catch (const Error& error) {
    throw UsageError(error.what());  // the budget is an option, so asking for too little is bad use
  }
}

}  // namespace

// No gradient comes to frozen units before the first trained one, so they have no backward; but for
// uses within those of other units, such as a tied head's.
StepOrder step_order_of(const ModelShape& model) {
  StepOrder order = mirrored_order(std::vector<int32_t>(model.uses.begin(), model.uses.end()),
                                   std::vector<int32_t>(model.ends.begin(), model.ends.end()));
  const auto first_trained = std::ranges::find_if(model.units, [](const UnitShape& unit) {
    return std::ranges::any_of(unit.tensors, [](const auto& each) { return !each.is_frozen; });
  });
  const auto num_silent = static_cast<int32_t>(first_trained - model.units.begin());
  const auto num_forward = static_cast<int32_t>(order.forward.size());
  const auto is_nested = [&](int32_t time) {
    return std::any_of(order.ends.begin(), order.ends.begin() + time,
                       [&](int32_t end) { return end >= time; });
  };
  for (auto i = static_cast<int32_t>(order.backward.size()) - 1; num_silent > 0 && i >= 0; --i) {
    const int32_t time = num_forward + i;
    if (order.backward[static_cast<size_t>(i)] >= num_silent || is_nested(time)) continue;
    order.backward.erase(order.backward.begin() + i);
    order.ends.erase(order.ends.begin() + time);
    for (int32_t& end : order.ends) end -= end > time ? 1 : 0;
  }
  return order;
}

PoolForecast forecast_pool(const ModelShape& model, std::span<const GroupPlan> groups,
                           const PlanOptions& options) {
  std::vector<UnitBuckets> units = declare_buckets(model, groups, options);
  PoolForecast forecast;
  forecast.prefetch = options.prefetch;
  forecast.num_gathers.assign(model.units.size(), 0);
  const int64_t casts = cast_bytes(groups, options);
  const bool has_weights = has_role(units, BucketRole::kWeight);
  const bool has_gradients = has_role(units, BucketRole::kGradient);
  if (!has_weights && !has_gradients) {
    forecast.grad_bytes = casts;
    return forecast;
  }

  PoolOptions pool{.kind = options.pool,
                   .prefetch = static_cast<int32_t>(options.prefetch),
                   .other_units = options.other_units,
                   .order = step_order_of(model)};
  if (options.pool_budget_bytes) {
    pool.budget_bytes = *options.pool_budget_bytes;
    pool.prefetch = depth_within_budget(units, pool);
    pool.budget_bytes = 0;  // the depth is known now
    forecast.prefetch = pool.prefetch;
  }
  forecast.num_gathers = count_gathers(units, pool.order, pool.prefetch);
  // Pools may share memory between the two, so the split is: what weights alone would need, and
  // what gradients add.
  const int64_t all_bytes = pool_bytes(units, pool) + casts;
  if (has_weights)
    forecast.weight_bytes = std::min(all_bytes, pool_bytes(only_weights(units), pool));
  forecast.grad_bytes = all_bytes - forecast.weight_bytes;
  return forecast;
}

}  // namespace fsdp
