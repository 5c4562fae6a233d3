#include "fsdp/shard/engine/engine_views.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

EngineView::EngineView(const Sharded& sharded) : engine_(&EngineAccess::of(sharded)) {}

const ShardOptions& EngineView::options() const { return engine_->options(); }
const Mesh& EngineView::mesh() const { return engine_->mesh(); }
c10::Device EngineView::device() const { return engine_->device(); }
const ShardedUnits& EngineView::units() const { return engine_->units(); }
void EngineView::wait() const { engine_->wait(); }

// --- updates -------------------------------------------------------------------------------------

EngineMemory& UpdateView::memory() const { return engine().memory(); }

std::shared_ptr<const std::string> UpdateView::register_optimizer(std::string name) const {
  if (const auto other = engine().optimizer().lock())
    throw UsageError(concat("the model has an optimizer already (", *other,
                            "), which updates all its parameters; use that one, or let go of it "
                            "first; rules in its options treat parameters differently"));
  auto registered = std::make_shared<const std::string>(std::move(name));
  engine().optimizer() = registered;
  return registered;
}

void UpdateView::begin_step(const char* reader) const {
  engine().refuse_while_whole(reader);
  engine().end_cycle(reader);
  engine().weights().release();
}

void UpdateView::find_missing() const { engine().gradients().missing().find(); }

std::vector<ShardedUnit*> UpdateView::order() const {
  std::vector<ShardedUnit*> wanted;
  std::vector<bool> is_in(units().size(), false);
  const auto add = [&](ShardedUnit& unit) {
    const auto index = static_cast<size_t>(unit.index());
    if (unit.is_trainable() && !is_in[index]) wanted.push_back(&unit);
    is_in[index] = true;
  };
  for (const auto& unit : units())
    if (unit->kind() != UnitKind::kScheduled) add(*unit);
  for (const int32_t index : engine().weights().order().forward)
    add(*units()[static_cast<size_t>(index)]);
  for (const auto& unit : units()) add(*unit);  // units that never ran
  return wanted;
}

void UpdateView::begin(ShardedUnit& unit, Work update) const {
  engine().gradients().expect_reader();
  unit.begin_update(std::move(update));
  // Nothing tells the next use of parameters outside units, so they are whole again before the
  // caller goes on.
  if (unit.kind() != UnitKind::kResident) return;
  unit.start_gather(SlabFrom::kBeside);
  unit.wait_gather();
  unit.wait_update();
}

void UpdateView::wait_updates() const { fsdp::wait_updates(units()); }

void UpdateView::cancel() const noexcept { cancel_updates(units()); }

Work UpdateView::sum_over_shards(const at::Tensor& tensor, GridKind kind, const Tag& tag,
                                 Work after) const {
  const PlacementPair placed = options().strategy.optimizer;
  const auto sum_along = [&](Placement placement, const MeshAxis& axis) {
    if (placement == Placement::kShard && axis.size() > 1)
      after = axis.reduce().all_reduce(tensor, {}, tag, after);
  };
  const Grid grid = mesh().grid(kind);
  sum_along(placed.inner, *grid.inner);
  sum_along(placed.outer, *grid.outer);
  if (grid.owners != nullptr) sum_along(Placement::kShard, *grid.owners);
  return after;
}

// --- recorded steps ------------------------------------------------------------------------------

void RecordingView::come_to_rest() const {
  engine().wait();
  engine().weights().release();
}

void RecordingView::renew_gradient_hooks() const { engine().renew_gradient_hooks(); }

// Units that stay whole are gathered within the step that updates them.
void RecordingView::expect_newer_weights() const {
  for (const auto& unit : units())
    if (unit->kind() != UnitKind::kResident)
      unit->expect_newer_weights(ShardedUnit::Which::kTrainable);
}

Gradients& RecordingView::gradients() const { return engine().gradients(); }

const Weights& RecordingView::weights() const { return engine().weights(); }

// --- the model's state ---------------------------------------------------------------------------

MeshShape StateView::mesh_shape() const { return engine().mesh_shape(); }

void StateView::refuse_while_whole(const char* what) const { engine().refuse_while_whole(what); }

void StateView::check_parameters(const ShardedUnit& unit) const {
  engine().weights().check_parameters(unit);
}

void StateView::take_over_main_weights() const { engine().take_over_main_weights(); }

}  // namespace fsdp
