// The engine while nothing computes: cycles end and begin, weights and types change.
#include <ATen/ATen.h>

#include <utility>

#include "fsdp/base/dtype.h"
#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/shard/engine.h"

namespace fsdp {

void Engine::finish_gradients() {
  if (in_backward_) end_backward();
  reduce_->finish();
}

void Engine::zero_grad() {
  finish_gradients();
  // One cycle may be a rehearsal.
  if (waits_for_reader_ && microbatch_ > 0 && ++num_unread_cycles_ == 2)
    warn_unread("a second cycle's gradients are dropped by zero_grad()");
  for (const auto& unit : units_)
    for (GroupState& state : unit->groups)
      if (state.group->is_trainable()) {
        state.group->gradient().zero();
        if (!unit->is_updating) state.group->gradient().give_back();
      }
  nonfinite_.zero_();
  microbatch_ = 0;
}

// zero_grad() of a module, or of torch's optimizers: what it means for our gradients is known.
void Engine::heed_cleared_gradients() {
  const GradientStandIns::Missing missing = stand_ins_.missing();
  if (missing == GradientStandIns::Missing::kNone) return;
  FSDP_CHECK(missing == GradientStandIns::Missing::kAll || (microbatch_ == 0 && !has_gradients()),
             "grad() of parameter '", stand_ins_.name_of_missing(),
             "' was set or cleared by itself, but gradients of a sharded model lie in shards and "
             "begin a cycle together; call zero_grad() of the optimizer, of Sharded or of the "
             "whole model");
  stand_ins_.put();
  zero_grad();
}

void Engine::count_unread_backward() {
  constexpr int32_t kMany = 16;
  if (waits_for_reader_ && is_last_microbatch_ && ++num_unread_backwards_ == kMany)
    warn_unread(concat(kMany, " backwards have come, none of them under no_sync()"));
}

void Engine::warn_unread(const std::string& what) {
  waits_for_reader_ = false;  // once is enough
  if (mesh_.outer().rank() != 0 || mesh_.inner().rank() != 0) return;
  log(LogLevel::kWarning, what,
      ", and nobody has used a gradient since fully_shard(): nothing is trained without step() of "
      "an fsdp::AdamW or fsdp::SGD, or a reader of Sharded::parameters() or flat_shards()");
}

bool Engine::has_gradients() const {
  for (const GradientCycle& cycle : gradient_cycles())
    if (!cycle.is_empty) return true;
  return false;
}

std::vector<GradientCycle> Engine::gradient_cycles() const {
  std::vector<GradientCycle> cycles;
  for (const auto& unit : units_)
    for (const GroupState& state : unit->groups)
      if (state.group->is_trainable()) cycles.push_back(state.group->gradient().cycle());
  return cycles;
}

void Engine::set_gradient_cycles(const std::vector<GradientCycle>& cycles) {
  auto next = cycles.begin();
  for (const auto& unit : units_)
    for (GroupState& state : unit->groups)
      if (state.group->is_trainable()) state.group->gradient().set_cycle(*next++);
}

void Engine::settle() {
  finish_gradients();
  heed_cleared_gradients();
  finish_updates();
}

void Engine::refresh_weights() {
  expect_reader();  // whose optimizer changed the weights
  settle();
  release_weights();
  for (const auto& unit : units_)
    for (GroupState& state : unit->groups)
      if (state.group->is_trainable()) state.group->refresh();
  gather_residents();
}

void Engine::take_over_main_weights() {
  settle();
  release_weights();
  for (const auto& unit : units_)
    for (GroupState& state : unit->groups) state.group->have_gathered_again();
  gather_residents();
}

// Units that stay whole are gathered within the step that updates them.
void Engine::expect_new_weights() {
  for (const auto& unit : units_)
    if (unit->kind != UnitKind::kResident)
      for (GroupState& state : unit->groups)
        if (state.group->is_trainable()) state.group->have_gathered_again();
}

void Engine::gather_residents() {
  for (const auto& unit : units_)
    if (unit->kind == UnitKind::kResident) gather_.start(*unit, SlabFrom::kBeside);
  for (const auto& unit : units_)
    if (unit->kind == UnitKind::kResident) gather_.finish(*unit);
}

bool Engine::found_nonfinite() {
  finish_gradients();
  expect_reader();
  at::Tensor flag = nonfinite_.clone();
  for (const auto& unit : units_)
    for (const GroupState& state : unit->groups) {
      if (!state.group->is_trainable()) continue;
      // One rank reduces nothing, so nothing has looked at its gradients yet.
      const GroupGradient& gradient = state.group->gradient();
      if (gradient.uses_slab() || gradient.reduces_at_cycle_end() || gradient.is_empty()) continue;
      flag.add_(at::isfinite(gradient.main().local()).all().logical_not());
    }
  for (const MeshAxis* axis : {&mesh_.inner(), &mesh_.outer()})
    if (axis->size() > 1)
      axis->reduce().all_reduce(flag, {.op = ReduceOp::kMax}, "found_nonfinite").wait();
  return flag.item<float>() != 0.0f;
}

void Engine::set_grad_comm(std::optional<at::ScalarType> grad_comm) {
  PrecisionPolicy wanted = options_.precision;
  wanted.grad_comm = grad_comm;
  finish_gradients();
  const auto wire_of = [&](const ParamGroup& group) {
    return resolve_types(group.types().weight, wanted.types(), Trainable::kYes).wire;
  };
  for (const auto& unit : units_)
    for (const GroupState& state : unit->groups)
      if (state.group->is_trainable()) check_wire(*unit, state, wire_of(*state.group));
  options_.precision = wanted;
  ++plan_number_;
  const bool memory_is_fixed = options_.pool != PoolKind::kOnDemand;
  for (const auto& unit : units_)
    for (GroupState& state : unit->groups)
      if (state.group->is_trainable())
        state.group->set_wire(wire_of(*state.group), memory_is_fixed
                                                         ? ParamGroup::BucketSize::kKeep
                                                         : ParamGroup::BucketSize::kFollow);
  reserve_wire_slots();
  if (!memory_is_fixed && !new_order_) new_order_ = plan_->order();  // a pool of the new sizes
}

void Engine::check_wire(const UnitState& unit, const GroupState& state, DType wire) const {
  FSDP_CHECK(state.group->gradient().is_empty(),
             "precision.grad_comm can change only between cycles; call zero_grad() first");
  if (!state.gradient_slab || options_.pool == PoolKind::kOnDemand) return;
  const int64_t bytes = state.group->layout().padded_numel() * element_bytes(wire);
  if (bytes <= state.gradient_slab->num_bytes()) return;
  throw UsageError(concat("precision.grad_comm ", name_of(wire), " needs ", bytes,
                          " bytes for the gradients of unit '", unit.name, "', but pool ",
                          name_of(options_.pool), " has ", state.gradient_slab->num_bytes(),
                          "; fixed memory takes types as wide as the first one or narrower: begin "
                          "with the widest, or use pool on_demand"));
}

void Engine::reset() {
  abandon_updates();
  for (const auto& unit : units_) {
    gather_.abandon(*unit);
    reduce_->abandon(*unit);
  }
  if (slabs_.has_pool()) slabs_.pool().abandon_step();
  wire_slots_.end_cycle();
  forget_backward();
  ++generation_;
  for (const auto& unit : units_) unit->num_pending = 0;
  put_off_.clear();
  plan_->abandon();
  nonfinite_.zero_();
  microbatch_ = 0;
  is_last_microbatch_ = true;
}

}  // namespace fsdp
