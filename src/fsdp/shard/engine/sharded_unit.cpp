#include "fsdp/shard/engine/sharded_unit.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <unordered_map>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/shard/call_unit.h"

namespace fsdp {

namespace {

// The named units of all models of this process; ranks may be its threads.
struct NamedUnits {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, UnitHooks*> hooks;
};

NamedUnits& named_units() {
  static NamedUnits units;
  return units;
}

}  // namespace

UnitHooks* named_unit_hooks(const torch::nn::Module& module) {
  const std::scoped_lock lock(named_units().mutex);
  const auto found = named_units().hooks.find(&module);
  return found == named_units().hooks.end() ? nullptr : found->second;
}

ShardedUnit::ShardedUnit(int32_t index, std::string name, UnitKind kind,
                         std::weak_ptr<UnitCalls> calls)
    : index_(index),
      name_(std::move(name)),
      kind_(kind),
      calls_(std::move(calls)),
      gather_tag_(concat(name_, " weight")),
      reduce_tag_(concat(name_, " gradient")),
      gather_range_(concat("fsdp::all_gather ", name_)),
      reduce_range_(concat("fsdp::reduce ", name_)) {}

ShardedUnit::~ShardedUnit() {
  if (named_module_ == nullptr) return;
  const std::scoped_lock lock(named_units().mutex);
  named_units().hooks.erase(named_module_);
}

void ShardedUnit::answer_for(const torch::nn::Module& module) {
  const std::scoped_lock lock(named_units().mutex);
  named_module_ = &module;
  named_units().hooks[named_module_] = this;
}

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
           return !group.slabs().weight || group.slabs().weight->has_room();
         });
}

void ShardedUnit::start_gather(SlabFrom from) {
  if (phase_ != WeightPhase::kResting) return;
  move(WeightPhase::kResting, WeightPhase::kGathering);
  for (ParamGroup& group : groups_) {
    RECORD_FUNCTION(gather_range_, {});
    std::optional<SlabLease>& lease = group.slabs().weight;
    if (lease) lease->acquire(from);
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

// Leads from kWhole to kResting.
void ShardedUnit::unbind() {
  move(WeightPhase::kWhole, WeightPhase::kResting);
  for (ParamGroup& group : groups_) {
    group.unbind();
    std::optional<SlabLease>& lease = group.slabs().weight;
    if (lease && lease->is_held()) lease->release();
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
    if (group.slabs().weight) group.slabs().weight->cancel();
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
    if (group.is_trainable() && group.gradient().cycle().is_empty()) group.gradient().release();
}

void wait_updates(const ShardedUnits& units) {
  for (const auto& unit : units) unit->wait_update();
}

void cancel_updates(const ShardedUnits& units) noexcept {
  for (const auto& unit : units) {
    try {
      unit->wait_update();
    } catch (const std::exception& error) {
      // Only logged: the caller reports the first error, which caused this one.
      log(LogLevel::kDebug, "a cancelled update had failed: ", error.what());
    }
  }
}

}  // namespace fsdp
