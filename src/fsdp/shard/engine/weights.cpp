#include "fsdp/shard/engine/weights.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/shard/engine/gradients.h"
#include "fsdp/shard/registered_pool.h"

namespace fsdp {

Weights::Weights(const ShardOptions& options, c10::Device device, const ShardedUnits& units,
                 SlabAllocator& pool_memory, UserBufferMemory* registered)
    : options_(options),
      device_(device),
      units_(units),
      pool_memory_(pool_memory),
      slabs_{.beside = pool_memory, .keeps_beside = options.pool != PoolKind::kOnDemand},
      registered_(registered) {}

void Weights::complete() {
  std::vector<int32_t> forward;
  std::vector<bool> scheduled;
  for (const auto& unit : units_) {
    names_.push_back(unit->name());
    scheduled.push_back(unit->kind() == UnitKind::kScheduled);
    if (scheduled.back()) forward.push_back(unit->index());
  }
  uses_.resize(units_.size());
  schedule_.emplace(std::move(scheduled), options_.prefetch);
  make_pool(mirrored_order(std::move(forward)));
}

void Weights::make_pool(StepOrder order) {
  ++plan_number_;
  std::vector<UnitBuckets> table;
  bool has_buckets = false;
  for (const auto& unit : units_) {
    table.push_back({unit->name(), {}});
    std::vector<Bucket>& buckets = table.back().buckets;
    for (ParamGroup& group : unit->groups()) {
      group.slabs() = {};
      if (unit->kind() != UnitKind::kScheduled) continue;
      const GroupBuckets wanted = group.buckets();
      for (const std::optional<Bucket>& bucket : {wanted.weight, wanted.gradient})
        if (bucket) buckets.push_back(*bucket);
    }
    has_buckets |= !buckets.empty();
  }
  if (has_buckets) {
    pool_.reset();  // releases the old memory before the new one is taken
    const OtherUnits others = other_units_with(options_.user_buffers, options_.other_units);
    pool_ = make_bucket_pool(std::move(table),
                             {.kind = options_.pool,
                              .prefetch = options_.prefetch,
                              .gradient_slots = kGradientSlots,
                              .other_units = others,
                              .on_move = options_.on_move,
                              .order = order,
                              .budget_bytes = options_.pool_budget_bytes},
                             pool_memory_);
    pool_->reserve();
  }
  for (const auto& unit : units_) lease_buckets(*unit);
  schedule_->expect(std::move(order), pool_.get());
}

void Weights::lease_buckets(ShardedUnit& unit) {
  BucketId next{unit.index(), 0};
  BucketPool* pool = unit.kind() == UnitKind::kScheduled ? pool_.get() : nullptr;
  const auto lease = [&](const std::optional<Bucket>& bucket, std::optional<SlabLease>& into) {
    if (!bucket) return;
    into.emplace(slabs_, pool, next, bucket->bytes);
    ++next.bucket;
  };
  for (ParamGroup& group : unit.groups()) {
    const GroupBuckets wanted = group.buckets();
    lease(wanted.weight, group.slabs().weight);
    lease(wanted.gradient, group.slabs().gradient);
  }
}

void Weights::change_wire() {
  ++plan_number_;
  if (options_.pool == PoolKind::kOnDemand && !new_order_) new_order_ = order();
}

void Weights::set_ahead(const ShardedUnit& unit, Phase phase, std::vector<ShardedUnit*> ahead) {
  use_of(unit).ahead[static_cast<size_t>(phase)] = std::move(ahead);
}

// --- passes --------------------------------------------------------------------------------------

Schedule::Kind Weights::pass_begun_by(const ShardedUnit& unit, bool trains) const {
  const Schedule::Kind now = schedule_->kind();
  const bool at_rest = num_active_ == 0;
  const bool anew =
      at_rest && unit.kind() == UnitKind::kScheduled && schedule_->would_start_anew(unit.index());
  if (trains)
    return now != Schedule::Kind::kTraining || anew ? Schedule::Kind::kTraining
                                                    : Schedule::Kind::kNone;
  const bool surprises = at_rest && now == Schedule::Kind::kInference && !schedule_->follows();
  const bool begins =
      now == Schedule::Kind::kNone || (now == Schedule::Kind::kInference && (anew || surprises));
  return begins ? Schedule::Kind::kInference : Schedule::Kind::kNone;
}

void Weights::open_pass(Schedule::Kind kind, int64_t num_backwards) {
  if (schedule_->kind() != Schedule::Kind::kNone) close_pass();
  release();
  if (new_order_ && num_pins_ == 0) make_pool(*std::exchange(new_order_, std::nullopt));
  if (registered_ != nullptr) registered_->begin_pass(num_backwards);
  if (pool_) pool_->begin_step();
  schedule_->open(kind);
}

void Weights::close_pass() {
  if (std::optional<StepOrder> learned = schedule_->close(names_)) new_order_ = std::move(learned);
  deferred_gathers_.clear();
}

// --- uses ----------------------------------------------------------------------------------------

Weights::Times Weights::begin_use(ShardedUnit& unit, Phase phase, CallMode mode) {
  Times times{begin_one(unit, phase, mode)};
  for (ShardedUnit* other : unit.needs()) times.push_back(begin_one(*other, phase, mode));
  return times;
}

void Weights::end_use(ShardedUnit& unit, const Times& times, Phase phase, CallMode mode) {
  for (size_t i = unit.needs().size(); i-- > 0;)
    end_one(*unit.needs()[i], times[i + 1], phase, mode);
  end_one(unit, times[0], phase, mode);
}

int32_t Weights::begin_one(ShardedUnit& unit, Phase phase, CallMode mode) {
  if (!device_.is_cpu()) unit.compute_on(current_stream(device_));
  if (phase == Phase::kForward) check_parameters(unit);
  int32_t time = -1;
  if (unit.kind() == UnitKind::kScheduled && mode != CallMode::kInBetween) {
    const bool followed = schedule_->follows();
    // A second forward is part of the backward it runs in.
    time = schedule_->begin(unit.index(), mode == CallMode::kRecompute ? Phase::kBackward : phase);
    // Weights that were gathered ahead on a wrong guess make room.
    if (followed && !schedule_->follows()) release();
    gather_ahead(unit, phase, mode);
  }
  // A use outside the plan must not move slabs of the plan.
  const bool is_planned =
      mode != CallMode::kInBetween && (mode != CallMode::kInference || schedule_->follows());
  unit.start_gather(is_planned ? SlabFrom::kPool : SlabFrom::kBeside);
  unit.wait_gather();
  unit.wait_update();
  ++use_of(unit).num_active;
  if (time >= 0) ++num_active_;
  return time;
}

void Weights::end_one(ShardedUnit& unit, int32_t time, Phase phase, CallMode mode) {
  if (time >= 0) {
    schedule_->end(time);
    --num_active_;
  }
  Use& use = use_of(unit);
  if (--use.num_active > 0 || use.num_pins > 0) return;
  const bool waits_for_backward =
      unit.stays_for_backward() && phase == Phase::kForward && mode == CallMode::kTraining;
  const bool stays = schedule_->follows() && use.stay_last > schedule_->now();
  if (waits_for_backward || stays) return;
  release_one(unit);
}

void Weights::gather_ahead(ShardedUnit& unit, Phase phase, CallMode mode) {
  Use& use = use_of(unit);
  const auto& wanted = use.ahead[static_cast<size_t>(phase)];
  // The unit's own gather may be among those put off; it keeps its planned end.
  for (const GatherPlan::Gather& gather : deferred_gathers_)
    if (gather.unit == unit.index()) use.stay_last = std::max(use.stay_last, gather.last);
  for (const GatherPlan::Gather& gather : schedule_->gathers_now()) {
    if (gather.unit == unit.index()) {
      unit.start_gather(SlabFrom::kPool);  // first, because it is needed now
      use.stay_last = gather.last;
    } else if (!wanted) {
      deferred_gathers_.push_back(gather);
    }
  }
  if (mode == CallMode::kRecompute && phase == Phase::kForward) return;
  for (const GatherPlan::Gather& gather : deferred_gathers_)
    if (gather.last >= schedule_->now())
      start_ahead(*units_[static_cast<size_t>(gather.unit)], gather.last);
  deferred_gathers_.clear();
  if (wanted)
    for (ShardedUnit* other : *wanted) start_ahead(*other, schedule_->now() + 1);
}

void Weights::start_ahead(ShardedUnit& unit, int32_t last) {
  // A guess never takes memory beside the pool.
  if (unit.kind() != UnitKind::kScheduled || !unit.has_room()) return;
  unit.start_gather(SlabFrom::kPool);
  use_of(unit).stay_last = std::max(use_of(unit).stay_last, last);
}

void Weights::release_one(ShardedUnit& unit) {
  unit.release_weights();
  use_of(unit).stay_last = -1;
}

void Weights::release() {
  for (const auto& unit : units_) release(*unit);
}

void Weights::release(ShardedUnit& unit) {
  if (use_of(unit).num_active == 0 && use_of(unit).num_pins == 0) release_one(unit);
}

void Weights::check_parameters(const ShardedUnit& unit) const {
  if (uses_[static_cast<size_t>(unit.index())].num_writers > 0) return;
  for (const ParamGroup& group : unit.groups()) group.check_members();
}

void Weights::pin(ShardedUnit& unit, bool writes) {
  unit.start_gather(SlabFrom::kBeside);
  Use& use = use_of(unit);
  ++use.num_pins;
  use.num_writers += writes ? 1 : 0;
  ++num_pins_;
}

void Weights::unpin(ShardedUnit& unit, bool writes) {
  Use& use = use_of(unit);
  if (use.num_pins == 0) return;  // cancelled
  --use.num_pins;
  use.num_writers -= writes ? 1 : 0;
  --num_pins_;
  release(unit);
}

void Weights::end_uses() {
  for (Use& use : uses_) use.num_active = 0;
  num_active_ = 0;
}

void Weights::gather_residents() {
  for (const auto& unit : units_)
    if (unit->kind() == UnitKind::kResident) unit->start_gather(SlabFrom::kBeside);
  for (const auto& unit : units_)
    if (unit->kind() == UnitKind::kResident) unit->wait_gather();
}

void Weights::cancel() noexcept {
  for (const auto& unit : units_) unit->cancel_weights();
  for (Use& use : uses_) {
    use.stay_last = -1;
    use.num_pins = use.num_writers = 0;
  }
  num_pins_ = 0;
  end_uses();
  deferred_gathers_.clear();
  if (schedule_) schedule_->cancel();
}

}  // namespace fsdp
