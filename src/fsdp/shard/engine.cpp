#include "fsdp/shard/engine.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/unit_call.h"

namespace fsdp {

namespace {

constexpr int32_t kGradientSlots = 2;  // one unit computes, one is reduced

MeshShape shape_of(const Mesh& mesh, Collectives collectives) {
  return {.outer = mesh.outer().size(),
          .inner = mesh.inner().size(),
          .talks_alone = collectives == Collectives::kAlways};
}

bool is_inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

Engine::Engine(const Mesh& mesh, const ShardOptions& options, c10::Device device)
    : mesh_(mesh),
      options_(options),
      device_(device),
      shape_(shape_of(mesh, options.collectives)),
      registered_(make_user_buffer_memory(mesh, shape_, options, device)),
      memory_(options, device, registered_.get()),
      nonfinite_(at::zeros({1}, at::device(device).dtype(at::kFloat))),
      wire_slots_(memory_.of(MemoryKind::kReduction)),
      slabs_(memory_.of(MemoryKind::kPool), options.pool),
      gather_(slabs_) {
  GroupSetting setting{.mesh = mesh,
                       .shape = shape_,
                       .rank = {.outer = mesh.outer().rank(), .inner = mesh.inner().rank()},
                       .device = device,
                       .strategy = options.strategy,
                       .precision = options.precision.types(),
                       .granularity = options.granularity,
                       .gradient = options.gradient,
                       .gradient_lifetime = options.gradient_lifetime,
                       .offload = options.offload,
                       .memory = memory_.for_groups(),
                       .wire_slots = wire_slots_};
  setting_.emplace(setting);
  setting.strategy.parameter = {Placement::kReplicate, Placement::kReplicate};
  resident_setting_.emplace(setting);
  reduce_.emplace(
      slabs_, ReduceSetting{.gradient_slots = kGradientSlots,
                            .report_nan = options.report_nan,
                            .rank = mesh.outer().rank() * mesh.inner().size() + mesh.inner().rank(),
                            .nonfinite = nonfinite_,
                            .wire_slots = wire_slots_});
}

Engine::~Engine() {
  abandon_updates();
  for (const auto& unit : units_) {
    gather_.abandon(*unit);
    reduce_->abandon(*unit);
  }
  if (slabs_.has_pool()) slabs_.pool().abandon_step();
}

// --- construction --------------------------------------------------------------------------------

UnitState& Engine::add_unit(std::string name, UnitKind kind) {
  auto unit = std::make_unique<UnitState>();
  unit->index = static_cast<int32_t>(units_.size());
  unit->kind = kind;
  unit->gather_tag = Tag(concat(name, " weight"));
  unit->reduce_tag = Tag(concat(name, " gradient"));
  unit->gather_range = concat("fsdp::all_gather ", name);
  unit->reduce_range = concat("fsdp::reduce ", name);
  names_.push_back(name);
  unit->name = std::move(name);
  units_.push_back(std::move(unit));
  return *units_.back();
}

const GroupSetting& Engine::setting_of(UnitKind kind) const {
  return kind == UnitKind::kResident ? *resident_setting_ : *setting_;
}

void Engine::complete() {
  StepOrder order;
  std::vector<bool> scheduled;
  for (const auto& unit : units_) {
    scheduled.push_back(unit->kind == UnitKind::kScheduled);
    if (scheduled.back()) order.forward.push_back(unit->index);
    for (const GroupState& state : unit->groups)
      if (state.group->is_trainable())
        for (const GroupMember& member : state.group->members())
          stand_ins_.add(member.parameter, member.names.front());
  }
  plan_.emplace(std::move(scheduled), options_.prefetch);
  make_pool(mirrored_order(std::move(order.forward)));
  reserve_wire_slots();
}

void Engine::reserve_wire_slots() {
  int64_t bytes = 0;
  size_t num_stages = 0;
  for (const auto& unit : units_)
    for (const GroupState& state : unit->groups)
      if (state.group->is_trainable()) {
        const GroupGradient& gradient = state.group->gradient();
        bytes = std::max(bytes, gradient.cast_bytes());
        num_stages = std::max(num_stages, gradient.num_stages_at_cycle_end());
      }
  wire_slots_.reserve(bytes, num_stages);
}

void Engine::make_pool(StepOrder order) {
  ++plan_number_;
  std::vector<UnitBuckets> table;
  bool has_buckets = false;
  for (const auto& unit : units_) {
    table.push_back({unit->name, {}});
    std::vector<Bucket>& buckets = table.back().buckets;
    const bool pooled = unit->kind == UnitKind::kScheduled;
    const auto declare = [&](const std::optional<Bucket>& bucket, std::optional<SlabLease>& lease) {
      lease.reset();
      if (!bucket) return;
      lease.emplace(
          pooled ? BucketId{unit->index, static_cast<int32_t>(buckets.size())} : BucketId{},
          bucket->bytes);
      if (pooled) buckets.push_back(*bucket);
    };
    for (GroupState& state : unit->groups) {
      const GroupBuckets wanted = state.group->buckets();
      declare(wanted.weight, state.weight_slab);
      declare(wanted.gradient, state.gradient_slab);
    }
    has_buckets |= !buckets.empty();
  }
  if (has_buckets) {
    slabs_.set_pool(nullptr);  // the old one's memory goes before the new one's comes
    slabs_.set_pool(make_bucket_pool(std::move(table),
                                     {.kind = options_.pool,
                                      .prefetch = options_.prefetch,
                                      .gradient_slots = kGradientSlots,
                                      .other_units = options_.other_units,
                                      .on_move = options_.on_move,
                                      .order = order,
                                      .budget_bytes = options_.budget_bytes},
                                     memory_.of(MemoryKind::kPool)));
    slabs_.pool().reserve();
  }
  plan_->expect(std::move(order), slabs_.has_pool() ? &slabs_.pool() : nullptr);
}

// --- passes --------------------------------------------------------------------------------------

Engine::CallMode Engine::begin_call(UnitState& unit) {
  if (is_inside_backward()) {
    enter_backward();
    return CallMode::kRecompute;
  }
  FSDP_CHECK(!in_backward_, "unit '", unit.name,
             "' is called after a backward that did not end (an exception?); call "
             "Sharded::reset() first");
  const bool trains =
      at::GradMode::is_enabled() || recompute_state() == RecomputeState::kFirstForward;
  const bool at_rest = num_active_ == 0;
  const bool anew =
      at_rest && unit.kind == UnitKind::kScheduled && plan_->would_start_anew(unit.index);
  if (trains) {
    if (plan_->kind() != PassPlan::Kind::kTraining || anew) open_pass(PassPlan::Kind::kTraining);
    return CallMode::kTraining;
  }
  if (plan_->kind() == PassPlan::Kind::kTraining) return CallMode::kInBetween;
  const bool surprises =
      at_rest && plan_->kind() == PassPlan::Kind::kInference && !plan_->follows();
  if (plan_->kind() == PassPlan::Kind::kNone || anew || surprises)
    open_pass(PassPlan::Kind::kInference);
  return CallMode::kInference;
}

int64_t Engine::count_call(UnitState& unit) {
  ++unit.num_pending;
  for (UnitState* other : unit.needs) ++other->num_pending;
  return generation_;
}

void Engine::uncount_call(UnitState& unit, int64_t generation) {
  if (generation != generation_) return;
  --unit.num_pending;
  for (UnitState* other : unit.needs) --other->num_pending;
}

void Engine::open_pass(PassPlan::Kind kind) {
  if (plan_->kind() != PassPlan::Kind::kNone) close_pass();
  reduce_->finish();
  release_weights();
  if (new_order_) make_pool(*std::exchange(new_order_, std::nullopt));
  if (registered_ != nullptr) registered_->begin_pass(backward_number_);
  if (slabs_.has_pool()) slabs_.pool().begin_step();
  plan_->open(kind);
}

void Engine::close_pass() {
  if (std::optional<StepOrder> learned = plan_->close(names_)) new_order_ = std::move(learned);
  put_off_.clear();
}

void Engine::release_weights() {
  for (const auto& unit : units_)
    if (unit->num_active == 0) gather_.release(*unit);
}

// --- uses ----------------------------------------------------------------------------------------

Engine::Times Engine::begin_use(UnitState& unit, Phase phase, CallMode mode) {
  Times times{begin_one(unit, phase, mode)};
  for (UnitState* other : unit.needs) times.push_back(begin_one(*other, phase, mode));
  return times;
}

void Engine::end_use(UnitState& unit, const Times& times, Phase phase, CallMode mode) {
  for (size_t i = unit.needs.size(); i-- > 0;) end_one(*unit.needs[i], times[i + 1], phase, mode);
  end_one(unit, times[0], phase, mode);
}

int32_t Engine::begin_one(UnitState& unit, Phase phase, CallMode mode) {
  if (!device_.is_cpu()) unit.stream = current_stream(device_);
  int32_t time = -1;
  if (unit.kind == UnitKind::kScheduled && mode != CallMode::kInBetween) {
    const bool followed = plan_->follows();
    // A second forward is part of the backward it runs in.
    time = plan_->begin(unit.index, mode == CallMode::kRecompute ? Phase::kBackward : phase);
    // What was gathered ahead on a wrong guess makes room.
    if (followed && !plan_->follows()) release_weights();
    gather_ahead(unit, phase, mode);
  }
  // What is not part of the plan must not move what is.
  const bool is_planned =
      mode != CallMode::kInBetween && (mode != CallMode::kInference || plan_->follows());
  gather_.start(unit, is_planned ? SlabFrom::kPool : SlabFrom::kBeside);
  gather_.finish(unit);
  settle_update(unit);
  ++unit.num_active;
  if (time >= 0) ++num_active_;
  return time;
}

void Engine::end_one(UnitState& unit, int32_t time, Phase phase, CallMode mode) {
  if (time >= 0) {
    plan_->end(time);
    --num_active_;
  }
  if (--unit.num_active > 0) return;
  const bool waits_for_backward =
      unit.stays_for_backward && phase == Phase::kForward && mode == CallMode::kTraining;
  const bool stays = plan_->follows() && unit.stay_last > plan_->now();
  if (waits_for_backward || stays) return;
  gather_.release(unit);
}

void Engine::gather_ahead(UnitState& unit, Phase phase, CallMode mode) {
  const auto& wanted = unit.ahead[static_cast<size_t>(phase)];
  // Its own gather may be among those put off; how long it stays is as planned.
  for (const StepSchedule::Gather& gather : put_off_)
    if (gather.unit == unit.index) unit.stay_last = std::max(unit.stay_last, gather.last);
  for (const StepSchedule::Gather& gather : plan_->gathers_now()) {
    if (gather.unit == unit.index) {
      gather_.start(unit, SlabFrom::kPool);  // first: it is the one that is needed
      unit.stay_last = gather.last;
    } else if (!wanted) {
      put_off_.push_back(gather);
    }
  }
  if (mode == CallMode::kRecompute && phase == Phase::kForward) return;
  for (const StepSchedule::Gather& gather : put_off_)
    if (gather.last >= plan_->now())
      start_ahead(*units_[static_cast<size_t>(gather.unit)], gather.last);
  put_off_.clear();
  if (wanted)
    for (UnitState* other : *wanted) start_ahead(*other, plan_->now() + 1);
}

void Engine::start_ahead(UnitState& unit, int32_t last) {
  // A guess never takes memory beside the pool.
  if (unit.kind != UnitKind::kScheduled || !gather_.has_room(unit)) return;
  gather_.start(unit, SlabFrom::kPool);
  unit.stay_last = std::max(unit.stay_last, last);
}

// --- backward ------------------------------------------------------------------------------------

void Engine::refuse_second_order() {
  FSDP_CHECK(!at::GradMode::is_enabled(),
             "backward runs with create_graph, but gradients of a sharded model cannot be "
             "differentiated again: by then its weights are sharded; use a model that is not "
             "sharded for second-order gradients");
}

void Engine::check_cycle() const {
  for (const auto& unit : units_)
    for (const GroupState& state : unit->groups)
      FSDP_CHECK(!state.group->is_trainable() || !state.group->gradient().is_cycle_over(),
                 "the gradients of unit '", unit->name,
                 "' were already reduced in this cycle; call zero_grad() before the next backward, "
                 "or run all but the last backward of a cycle under no_sync()");
}

void Engine::enter_backward() {
  if (!in_backward_) {
    reduce_->finish();  // of the backward before: its gradients may still lie where ours will
    finish_updates();   // of units that had no forward: they read what we will write
    heed_cleared_gradients();
    check_cycle();
    count_unread_backward();
    stand_ins_.take();
    in_backward_ = true;
    ++backward_number_;
    reduce_->begin_backward(is_last_microbatch_, microbatch_);
  }
  // A callback belongs to the innermost backward; that of a recomputed part ends too early.
  if (end_is_queued_ || recompute_state() == RecomputeState::kInnerBackward) return;
  end_is_queued_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto engine = weak.lock()) engine->end_backward();
  });
}

void Engine::add_open_call(std::shared_ptr<UnitCall> call) {
  open_calls_.push_back(std::move(call));
}

void Engine::end_calls_after(int64_t number) {
  while (!open_calls_.empty() && open_calls_.back()->number() > number) {
    const std::shared_ptr<UnitCall> call = std::move(open_calls_.back());
    open_calls_.pop_back();
    call->end_backward();
  }
}

// Note [When a unit is reduced]
// At the end of its last call's backward, and not when all its gradients are there: which of them
// come at all may differ from rank to rank (experts without tokens), but all ranks must reduce in
// the same order. What did not come is zero.
void Engine::call_is_through(UnitState& unit) {
  if (unit.num_pending == 0) reduce_rest(unit, Which::kSafe);
  for (UnitState* other : unit.needs)
    if (other->num_pending == 0) reduce_rest(*other, Which::kSafe);
  reduce_->retire_all_but(unit);
}

Engine::DirectTarget Engine::direct_target(UnitState& unit, GroupState& state, int64_t member,
                                           GradientType type) {
  // A unit that is used again later in this backward would keep its slab all that time.
  if (!in_backward_ || unit.num_pending > 1 || state.is_reduced) return {};
  GroupGradient& gradient = state.group->gradient();
  const at::ScalarType written = gradient.uses_slab() ? gradient.wire() : gradient.main_dtype();
  const at::ScalarType own =
      state.group->members()[static_cast<size_t>(member)].parameter.scalar_type();
  const bool widens = type == GradientType::kOrWider && written == at::kFloat &&
                      (own == at::kBFloat16 || own == at::kHalf);
  if (written != own && !widens) return {};
  reduce_->prepare(unit);
  const bool adds = gradient.is_written(member);
  if (adds) gradient.place_accepted();
  gradient.mark_written(member);
  return {gradient.target(member), adds};
}

void Engine::gradient_ready(UnitState& unit, GroupState& state, int64_t member,
                            const at::Tensor& gradient) {
  refuse_second_order();
  enter_backward();
  if (state.is_reduced && !gradient.defined()) return;
  // Another contribution after the reduction began (a repeated backward through a unit that is used
  // twice): a second reduction adds it, at the end of the backward.
  state.is_reduced = false;
  reduce_->accept(unit, state, member, gradient);
}

void Engine::reduce_rest(UnitState& unit, Which which) {
  for (GroupState& state : unit.groups) {
    if (!state.group->is_trainable() || state.is_reduced) continue;
    // What is reduced once per cycle takes no second reduction, and how many calls a repeated
    // backward goes through is not known.
    if (which == Which::kSafe && unit.is_repeated && !state.gradient_slab) continue;
    reduce_->reduce(unit, state);
  }
}

void Engine::end_backward() {
  end_calls_after(-1);
  // Units that no call of this backward ended; also parameters outside units, of which nothing else
  // says when they were used for the last time.
  for (const auto& unit : units_) reduce_rest(*unit, Which::kAll);
  forget_backward();
  stand_ins_.put();
  ++microbatch_;
  close_pass();
  release_weights();
}

void Engine::forget_backward() {
  for (const auto& unit : units_) {
    unit->num_active = 0;
    unit->is_repeated = false;
    for (GroupState& state : unit->groups) state.is_reduced = false;
  }
  open_calls_.clear();
  num_active_ = 0;
  in_backward_ = false;
  end_is_queued_ = false;
}

}  // namespace fsdp
