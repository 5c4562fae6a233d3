#include "fsdp/memory/bucket_pool.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/memory/pool/planned_pool.h"
#include "fsdp/memory/pool/slot_pool.h"

namespace fsdp {

namespace {

constexpr std::array<PoolKind, 4> kPoolKinds = {PoolKind::kOnDemand, PoolKind::kDoubleBuffer,
                                                PoolKind::kMaxPool, PoolKind::kPlanned};

std::unique_ptr<BucketPool> make_planned(BucketTable table, const PoolOptions& options,
                                         const StepOrder& order, SlabAllocator& allocator) {
  const ArenaPlannerOptions planner{.alignment = options.alignment};
  if (options.budget_bytes == 0) {
    ArenaPlan plan = plan_prefetch(table, order, options.prefetch, planner);
    return make_planned_pool(std::move(table), std::move(plan), options.alignment, allocator);
  }
  BudgetedPlan chosen = deepest_prefetch(table, order, options.budget_bytes, planner);
  log(LogLevel::kInfo, chosen.text);
  return make_planned_pool(std::move(table), std::move(chosen.plan), options.alignment, allocator);
}

std::unique_ptr<BucketPool> make_slotted(BucketTable table, const PoolOptions& options,
                                         const StepOrder& order, SlabAllocator& allocator) {
  LiveTrace trace = zero3_trace(table, order, options.prefetch);
  const SlotOptions slots{
      .num_slots = num_slots_for(table, trace, options.prefetch, options.gradient_slots),
      .on_move = options.on_move,
      .alignment = options.alignment};
  SlotLayout layout = options.kind == PoolKind::kOnDemand ? on_demand_layout(table)
                      : options.kind == PoolKind::kMaxPool
                          ? max_pool_layout(table, slots)
                          : double_buffer_layout(table, options.other_units, slots);
  return make_slot_pool(std::move(table), std::move(layout), slots, std::move(trace), allocator);
}

// The deepest prefetch with which a pool of this kind stays within the budget; bytes grow with the
// depth, so it is found by halving.
int32_t prefetch_within_budget(const std::vector<UnitBuckets>& units, PoolOptions options,
                               const StepOrder& order, SlabAllocator& allocator) {
  const int64_t budget_bytes = std::exchange(options.budget_bytes, 0);
  const auto bytes_with = [&](int32_t prefetch) {
    options.prefetch = prefetch;
    return make_bucket_pool(units, options, allocator)->bytes().total();
  };
  const int64_t least = bytes_with(0);
  if (least > budget_bytes)
    throw UsageError(concat("pool_budget_bytes is ", budget_bytes, ", but pool ",
                            name_of(options.kind), " needs ", least,
                            " bytes without any prefetch"));
  int32_t fits = 0;
  int32_t too_deep = static_cast<int32_t>(order.forward.size() + order.backward.size());
  while (too_deep - fits > 1) {
    const int32_t middle = fits + (too_deep - fits) / 2;
    (bytes_with(middle) <= budget_bytes ? fits : too_deep) = middle;
  }
  return fits;
}

}  // namespace

void BucketPool::reserve() {
  if (reserved_) return;
  reserve_memory();
  reserved_ = true;
  // Every rank has the same pool, so only one of them logs its report.
  if (thread_rank() <= 0) log(LogLevel::kDebug, report());
}

void BucketPool::begin_step() {
  FSDP_CHECK(num_held_ == 0, "a step begins while ", num_held_,
             " buckets are still held; release them at the end of the step (", held_text(), ")");
  reset_step();
}

void* BucketPool::acquire(BucketId id) {
  const int32_t index = table_.index_of(id);
  uint8_t& is_held = held_[static_cast<size_t>(index)];
  FSDP_CHECK(is_held == 0, table_.text(id), " is acquired twice; release it first (", held_text(),
             ")");
  if (!reserved_) [[unlikely]]
    reserve();
  void* const address = take(id, index);
  is_held = 1;
  ++num_held_;
  return address;
}

void BucketPool::release(BucketId id) {
  const int32_t index = table_.index_of(id);
  uint8_t& is_held = held_[static_cast<size_t>(index)];
  FSDP_CHECK(is_held != 0, table_.text(id),
             " is released but not held; acquire it first, and release it once (", held_text(),
             ")");
  release_memory(id, index);
  is_held = 0;
  --num_held_;
}

bool BucketPool::can_acquire(BucketId id) const {
  const int32_t index = table_.index_of(id);
  return held_[static_cast<size_t>(index)] == 0 && can_take(id, index);
}

void BucketPool::cancel_step() noexcept {
  for (int32_t i = 0; num_held_ > 0 && i < table_.num_buckets(); ++i) {
    if (held_[static_cast<size_t>(i)] != 0) release(table_.id_of(i));
  }
}

bool BucketPool::addresses_are_fixed() const {
  for (int32_t i = 0; i < table_.num_buckets(); ++i) {
    if (!address_is_fixed(table_.id_of(i))) return false;
  }
  return true;
}

std::string BucketPool::held_text() const {
  std::vector<std::string> held;
  for (int32_t i = 0; i < table_.num_buckets(); ++i) {
    if (held_[static_cast<size_t>(i)] != 0) held.push_back(table_.text(table_.id_of(i)));
  }
  return held.empty() ? "nothing is held" : concat("held: ", join(held, ", "));
}

std::string_view name_of(PoolKind kind) {
  switch (kind) {
    case PoolKind::kOnDemand:
      return "on_demand";
    case PoolKind::kDoubleBuffer:
      return "double_buffer";
    case PoolKind::kMaxPool:
      return "max_pool";
    case PoolKind::kPlanned:
      return "planned";
  }
  return "?";
}

std::span<const PoolKind> all_pool_kinds() { return kPoolKinds; }

void PoolOptions::validate() const {
  const auto check = [](bool good, const char* field, int64_t value, const char* allowed) {
    if (!good) throw UsageError(concat("pool option ", field, " is ", value, "; ", allowed));
  };
  check(prefetch >= 0, "prefetch", prefetch, "it counts units ahead, so 0 or more");
  check(gradient_slots >= 1, "gradient_slots", gradient_slots, "it must be 1 or more");
  check(budget_bytes >= 0, "pool_budget_bytes", budget_bytes, "it must be 0 (no limit) or more");
  check(alignment > 0 && (alignment & (alignment - 1)) == 0, "alignment", alignment,
        "it must be a power of two");
}

std::unique_ptr<BucketPool> make_bucket_pool(std::vector<UnitBuckets> units,
                                             const PoolOptions& options, SlabAllocator& allocator) {
  options.validate();
  BucketTable table(std::move(units));
  const bool order_given = !options.order.forward.empty() || !options.order.backward.empty() ||
                           !options.order.ends.empty();
  const StepOrder order = order_given ? options.order : declared_order(table);
  if (options.budget_bytes > 0 && options.kind != PoolKind::kPlanned) {
    const std::vector<UnitBuckets> declared(table.units().begin(), table.units().end());
    PoolOptions chosen = options;
    chosen.prefetch = prefetch_within_budget(declared, options, order, allocator);
    chosen.budget_bytes = 0;
    return make_bucket_pool(declared, chosen, allocator);
  }
  switch (options.kind) {
    case PoolKind::kOnDemand:
    case PoolKind::kDoubleBuffer:
    case PoolKind::kMaxPool:
      return make_slotted(std::move(table), options, order, allocator);
    case PoolKind::kPlanned:
      return make_planned(std::move(table), options, order, allocator);
  }
  throw UsageError("pool option kind is no kind of pool");
}

}  // namespace fsdp
