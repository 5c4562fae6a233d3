#include "fsdp/shard/engine/sharded_unit.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <exception>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"

namespace fsdp {

ShardedUnit::ShardedUnit(int32_t index, std::string name, UnitKind kind, SlabSource& slabs)
    : index_(index),
      name_(std::move(name)),
      kind_(kind),
      slabs_(slabs),
      gather_tag_(concat(name_, " weight")),
      reduce_tag_(concat(name_, " gradient")),
      gather_range_(concat("fsdp::all_gather ", name_)),
      reduce_range_(concat("fsdp::reduce ", name_)) {}

ParamGroup& ShardedUnit::add_group(std::vector<GroupMember> members, Trainable trainable,
                                   const GroupSetting& setting, FlatLayoutRequest request) {
  ParamGroup& group =
      groups_.emplace_back(name_, std::move(members), trainable, setting, std::move(request));
  phase_ = has_slabs() ? WeightPhase::kResting : WeightPhase::kWhole;
  if (phase_ == WeightPhase::kResting)
    for (ParamGroup& each : groups_) each.unbind();
  return group;
}

bool ShardedUnit::has_slabs() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const ParamGroup& group) { return group.needs_slab(); });
}

bool ShardedUnit::is_trainable() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const ParamGroup& group) { return group.is_trainable(); });
}

void ShardedUnit::move(WeightPhase from, WeightPhase to) {
  FSDP_ASSERT(phase_ == from, "unit ", name_, " is in phase ", static_cast<int>(phase_), ", not ",
              static_cast<int>(from));
  phase_ = to;
}

bool ShardedUnit::has_room() const {
  return phase_ != WeightPhase::kResting ||
         std::all_of(groups_.begin(), groups_.end(), [&](const ParamGroup& group) {
           return !group.slabs().weight || slabs_.has_room(*group.slabs().weight);
         });
}

void ShardedUnit::start_gather(SlabFrom from) {
  if (phase_ != WeightPhase::kResting) return;
  move(WeightPhase::kResting, WeightPhase::kGathering);
  for (ParamGroup& group : groups_) {
    RECORD_FUNCTION(gather_range_, {});
    std::optional<SlabLease>& lease = group.slabs().weight;
    if (lease) slabs_.acquire(*lease, from);
    group.start_gather(lease ? lease->address() : nullptr, gather_tag_, update_);
  }
}

void ShardedUnit::wait_gather() {
  if (phase_ != WeightPhase::kGathering) return;
  move(WeightPhase::kGathering, WeightPhase::kWhole);
  std::exception_ptr error;
  for (ParamGroup& group : groups_) {
    try {
      group.wait_gather();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (!error) return;
  // All groups have been waited for, so nobody writes to their slabs any more.
  unbind();
  std::rethrow_exception(error);
}

// From kWhole to kResting.
void ShardedUnit::unbind() {
  move(WeightPhase::kWhole, WeightPhase::kResting);
  for (ParamGroup& group : groups_) {
    group.unbind();
    std::optional<SlabLease>& lease = group.slabs().weight;
    if (lease && lease->is_held()) slabs_.release(*lease);
  }
}

void ShardedUnit::release_weights() {
  if (!has_slabs() || phase_ == WeightPhase::kResting) return;
  wait_gather();
  unbind();
}

void ShardedUnit::cancel_weights() noexcept {
  try {
    wait_gather();
  } catch (const std::exception& error) {
    // Only logged: the caller reports the first error, which caused this one.
    log(LogLevel::kDebug, "a cancelled gather had failed: ", error.what());
  }
  if (!has_slabs()) return;
  for (ParamGroup& group : groups_) {
    group.unbind();
    if (group.slabs().weight) slabs_.cancel(*group.slabs().weight);
  }
  phase_ = WeightPhase::kResting;
}

void ShardedUnit::expect_newer_weights(Which which) {
  bool are_stale = false;
  for (ParamGroup& group : groups_)
    if (which == Which::kAll || group.is_trainable()) are_stale |= group.expect_newer();
  if (!are_stale || phase_ == WeightPhase::kResting) return;
  wait_gather();
  unbind();
}

void ShardedUnit::begin_update(Work update) {
  expect_newer_weights(Which::kTrainable);
  update_ = std::move(update);
  is_updating_ = true;
  wait_gather();
  if (phase_ == WeightPhase::kWhole) unbind();
}

void ShardedUnit::wait_update() {
  if (!std::exchange(is_updating_, false)) return;
  std::exchange(update_, {}).wait();
  for (ParamGroup& group : groups_)
    if (group.is_trainable() && group.gradient().is_empty()) group.gradient().release();
}

}  // namespace fsdp
