// How an optimizer's updates and the engine's gathers and reductions keep out of each other's way.
#include <algorithm>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/shard/engine.h"

namespace fsdp {

std::shared_ptr<const std::string> Engine::seat_optimizer(std::string name) {
  if (const auto other = optimizer_.lock())
    throw UsageError(concat("the model has an optimizer already (", *other,
                            "), which updates all its parameters; use that one, or let go of it "
                            "first; rules in its options treat parameters differently"));
  auto seat = std::make_shared<const std::string>(std::move(name));
  optimizer_ = seat;
  return seat;
}

std::vector<UnitState*> Engine::update_order() const {
  std::vector<UnitState*> wanted;
  std::vector<bool> is_in(units_.size(), false);
  const auto add = [&](UnitState& unit) {
    const bool trains =
        std::any_of(unit.groups.begin(), unit.groups.end(),
                    [](const GroupState& state) { return state.group->is_trainable(); });
    if (trains && !is_in[static_cast<size_t>(unit.index)]) wanted.push_back(&unit);
    is_in[static_cast<size_t>(unit.index)] = true;
  };
  for (const auto& unit : units_)
    if (unit->kind != UnitKind::kScheduled) add(*unit);
  for (const int32_t index : order().forward) add(*units_[static_cast<size_t>(index)]);
  for (const auto& unit : units_) add(*unit);  // those that never ran
  return wanted;
}

void Engine::begin_update(UnitState& unit, Work update) {
  expect_reader();
  unit.update = update;
  unit.is_updating = true;
  for (GroupState& state : unit.groups)
    if (state.group->is_trainable()) state.group->follow_update(update);
  // Nothing says when they are used next, so they are whole again before the caller goes on.
  if (unit.kind != UnitKind::kResident) return;
  gather_.start(unit, SlabFrom::kBeside);
  gather_.finish(unit);
  settle_update(unit);
}

void Engine::settle_update(UnitState& unit) {
  if (!std::exchange(unit.is_updating, false)) return;
  for (GroupState& state : unit.groups)
    if (state.group->is_trainable()) state.group->forget_update();
  std::exchange(unit.update, {}).wait();
  for (GroupState& state : unit.groups)
    if (state.group->is_trainable() && state.group->gradient().is_empty())
      state.group->gradient().give_back();
}

void Engine::abandon_updates() noexcept {
  for (const auto& unit : units_) {
    try {
      settle_update(*unit);
    } catch (const std::exception& error) {
      // What made it be given up is thrown; this follows from it.
      log(LogLevel::kDebug, "an update that was given up had failed: ", error.what());
    }
  }
}

void Engine::finish_updates() {
  for (const auto& unit : units_) settle_update(*unit);
}

}  // namespace fsdp
