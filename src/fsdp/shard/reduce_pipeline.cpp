#include "fsdp/shard/reduce_pipeline.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "fsdp/base/error.h"

namespace fsdp {

ReducePipeline::ReducePipeline(SlabSource& slabs, ReduceSetting setting)
    : slabs_(slabs), setting_(std::move(setting)) {}

void ReducePipeline::begin_backward(bool is_last, int64_t microbatch) {
  is_last_ = is_last;
  microbatch_ = microbatch;
}

int32_t ReducePipeline::num_units_with_slabs(const UnitState& but) const {
  int32_t count = 0;
  const UnitState* last = &but;
  for (const InFlight& entry : in_flight_) {
    if (entry.unit == last || entry.unit == &but) continue;
    ++count;
    last = entry.unit;
  }
  return count;
}

void ReducePipeline::prepare(UnitState& unit) {
  for (GroupState& state : unit.groups) {
    if (!state.group->is_trainable() || state.is_reduced) continue;
    GroupGradient& gradient = state.group->gradient();
    // A slab whose reduction runs takes nothing more; what was reduced for good does not either.
    while (is_in_flight(state)) retire_front();
    if (!state.gradient_slab) {
      FSDP_CHECK(!gradient.is_cycle_over(), "a gradient of unit '", unit.name,
                 "' came after the reduction that ends the cycle; run this backward under "
                 "no_sync(), and one more after it");
      gradient.begin_direct();
    } else if (!gradient.has_slab()) {
      while (num_units_with_slabs(unit) >= setting_.gradient_slots) retire_front();
      slabs_.acquire(*state.gradient_slab, SlabFrom::kPool);
      gradient.begin_slab(state.gradient_slab->address());
    }
  }
}

bool ReducePipeline::is_in_flight(const GroupState& state) const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [&](const InFlight& entry) { return entry.state == &state; });
}

void ReducePipeline::check_finite(const GroupState& state, int64_t member,
                                  const at::Tensor& gradient) const {
  const bool is_finite = at::isfinite(gradient).all().item<bool>();
  FSDP_CHECK(is_finite, "the gradient of parameter '",
             state.group->members()[static_cast<size_t>(member)].names.front(), "' of unit '",
             state.group->unit(), "' is not finite on rank ", setting_.rank, " in microbatch ",
             microbatch_, "; it has not been sent to other ranks");
}

void ReducePipeline::accept(UnitState& unit, GroupState& state, int64_t member,
                            const at::Tensor& gradient) {
  GroupGradient& target = state.group->gradient();
  if (gradient.defined()) {
    prepare(unit);
    target.accept(member, gradient);
  }
  // As it will travel: a value may be too large for the wire.
  if (setting_.report_nan != ReportNan::kOff && target.is_written(member)) {
    target.place_accepted();
    check_finite(state, member, target.target(member));
  }
}

void ReducePipeline::reduce(UnitState& unit, GroupState& state) {
  RECORD_FUNCTION(unit.reduce_range, {});
  prepare(unit);
  state.is_reduced = true;
  GroupGradient& gradient = state.group->gradient();
  if (state.gradient_slab) {
    gradient.start_backward_reduction(setting_.nonfinite, unit.reduce_tag);
    in_flight_.push_back({&unit, &state});
  } else if (is_last_) {
    start_cycle_end(unit, state);
  } else {
    gradient.place_accepted();
  }
}

void ReducePipeline::start_cycle_end(UnitState& unit, GroupState& state) {
  GroupGradient& gradient = state.group->gradient();
  gradient.start_cycle_reduction(setting_.nonfinite, unit.reduce_tag);
  if (gradient.reduces_at_cycle_end()) at_cycle_end_.push_back({&unit, &state});
}

void ReducePipeline::finish_cycle() {
  while (!at_cycle_end_.empty()) {
    const InFlight entry = at_cycle_end_.front();
    at_cycle_end_.pop_front();
    entry.state->group->gradient().finish_cycle_reduction();
  }
  setting_.wire_slots.end_cycle();
}

void ReducePipeline::retire_front() {
  const InFlight entry = in_flight_.front();
  in_flight_.pop_front();
  GroupGradient& gradient = entry.state->group->gradient();
  gradient.finish_backward_reduction();
  slabs_.release(*entry.state->gradient_slab);
  if (is_last_ && gradient.reduces_at_cycle_end()) start_cycle_end(*entry.unit, *entry.state);
}

void ReducePipeline::retire_all_but(const UnitState& unit) {
  while (!in_flight_.empty() && in_flight_.front().unit != &unit) retire_front();
}

void ReducePipeline::finish() {
  while (!in_flight_.empty()) retire_front();
  finish_cycle();
}

void ReducePipeline::abandon(UnitState& unit) noexcept {
  for (std::deque<InFlight>* entries : {&in_flight_, &at_cycle_end_})
    std::erase_if(*entries, [&](const InFlight& entry) { return entry.unit == &unit; });
  for (GroupState& state : unit.groups) {
    if (state.group->is_trainable()) state.group->gradient().abandon();
    if (state.gradient_slab) slabs_.forget(*state.gradient_slab);
  }
}

}  // namespace fsdp
