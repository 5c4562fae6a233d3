#include "fsdp/shard/engine/engine.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/shard/engine/backward_errors.h"
#include "fsdp/shard/engine/gradient_hook.h"
#include "fsdp/shard/engine/unit_call.h"
#include "fsdp/shard/recompute.h"

namespace fsdp {

namespace {

MeshShape shape_of(const Grid& grid, Collectives collectives) {
  return {.outer = grid.outer->size(),
          .inner = grid.inner->size(),
          .talks_alone = collectives == Collectives::kAlways};
}

bool is_inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

Engine::Engine(const Mesh& mesh, const ShardOptions& options, c10::Device device)
    : mesh_(mesh),
      options_(options),
      device_(device),
      shape_(shape_of(mesh.grid(GridKind::kDense), options.collectives)),
      registered_(make_user_buffer_memory(mesh, shape_, options, device)),
      memory_(options, device, registered_.get()),
      wire_slots_(memory_.of(MemoryKind::kReduction)),
      slabs_(memory_.of(MemoryKind::kPool), options.pool),
      weights_(options_, device, units_, slabs_, memory_.of(MemoryKind::kPool), registered_.get()),
      gradients_(options_, device, mesh, units_, slabs_, wire_slots_),
      missing_gradients_(mesh, units_, device) {
  const int64_t num_losses = mesh.num_losses();
  for (const ParameterKindRow& row : kParameterKinds) {
    const Grid grid = mesh.grid(row.grid);
    const bool is_copied = row.kind == ParameterKind::kEqual;
    GroupSetting setting{.kind = row.kind,
                         .grid = grid,
                         .shape = shape_of(grid, options.collectives),
                         .rank = {.outer = grid.outer->rank(), .inner = grid.inner->rank()},
                         .num_losses = num_losses,
                         .num_copies = is_copied ? mesh.size() / num_losses : 1,
                         .device = device,
                         .strategy = options.strategy,
                         .precision = options.precision.types(),
                         .quantization = options.quantization,
                         .granularity = options.granularity,
                         .gradient = options.gradient,
                         .gradient_lifetime = options.gradient_lifetime,
                         .offload = options.offload,
                         .memory = memory_.for_groups(),
                         .wire_slots = wire_slots_};
    settings_.push_back(setting);
    setting.strategy.parameter = {Placement::kReplicate, Placement::kReplicate};
    resident_settings_.push_back(setting);
  }
}

Engine::~Engine() {
  cancel_updates();
  weights_.cancel();
  gradients_.cancel();
  if (slabs_.has_pool()) slabs_.pool().cancel_step();
}

// --- construction --------------------------------------------------------------------------------

ShardedUnit& Engine::add_unit(std::string name, UnitKind kind) {
  units_.push_back(std::make_unique<ShardedUnit>(static_cast<int32_t>(units_.size()),
                                                 std::move(name), kind, slabs_));
  return *units_.back();
}

const GroupSetting& Engine::setting_of(UnitKind unit, ParameterKind parameters) const {
  const auto& settings = unit == UnitKind::kResident ? resident_settings_ : settings_;
  return settings[static_cast<size_t>(parameters)];
}

void Engine::own_hooks(std::unique_ptr<UnitHooks> hooks) {
  named_hooks_.push_back(std::move(hooks));
}

void Engine::complete() {
  calls_.resize(units_.size());
  gradients_.complete();
  weights_.complete();
  renew_gradient_hooks();
}

void Engine::renew_gradient_hooks() {
  gradient_hooks_.reset();
  gradient_hooks_ = std::make_unique<GradientHooks>(shared_from_this());
}

// --- calls ---------------------------------------------------------------------------------------

CallMode Engine::begin_call(ShardedUnit& unit) {
  if (is_inside_backward()) {
    enter_backward();
    return CallMode::kRecompute;
  }
  FSDP_CHECK(!in_backward_, "unit '", unit.name(),
             "' is called after a backward that did not end (an exception?); call "
             "Sharded::reset() first");
  const bool trains =
      at::GradMode::is_enabled() || recompute_state() == RecomputeState::kFirstForward;
  const Schedule::Kind kind = weights_.pass_begun_by(unit, trains);
  if (kind != Schedule::Kind::kNone) {
    gradients_.wait();
    weights_.open_pass(kind, backward_number_);
  }
  if (trains) return CallMode::kTraining;
  return weights_.is_training() ? CallMode::kInBetween : CallMode::kInference;
}

int64_t Engine::count_call(ShardedUnit& unit) {
  ++calls_of(unit).num_pending;
  for (ShardedUnit* other : unit.needs()) ++calls_of(*other).num_pending;
  return generation_;
}

void Engine::uncount_call(ShardedUnit& unit, int64_t generation) {
  if (generation != generation_) return;
  --calls_of(unit).num_pending;
  for (ShardedUnit* other : unit.needs()) --calls_of(*other).num_pending;
}

// --- backward ------------------------------------------------------------------------------------

void Engine::refuse_second_order() {
  FSDP_CHECK(!at::GradMode::is_enabled(),
             "backward runs with create_graph, but gradients of a sharded model cannot be "
             "differentiated again: by then its weights are sharded; use a model that is not "
             "sharded for second-order gradients");
}

void Engine::enter_backward() {
  if (!in_backward_) {
    gradients_.wait();  // of the backward before: its gradients may still lie where ours will
    wait_updates();     // of units without a forward: they read what we will write
    gradients_.heed_cleared();
    gradients_.begin_backward();
    in_backward_ = true;
    ++backward_number_;
  }
  // A callback belongs to the innermost backward; that of a recomputed part would end too early.
  if (end_is_queued_ || recompute_state() == RecomputeState::kInnerBackward) return;
  end_is_queued_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (const auto engine = weak.lock()) in_backward([&] { engine->end_backward(); });
  });
}

void Engine::begin_call_backward(std::shared_ptr<UnitCall> call, ShardedUnit& unit,
                                 bool is_repeated) {
  calls_of(unit).is_repeated |= is_repeated;
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
// At the end of its last call's backward, and not when all its gradients are complete: ranks may
// differ in which gradients come at all (experts without tokens), but all must reduce in the same
// order. A gradient that did not come is zero.
void Engine::call_is_through(ShardedUnit& unit) {
  reduce_if_through(unit);
  for (ShardedUnit* other : unit.needs()) reduce_if_through(*other);
  gradients_.wait_all_but(unit);
}

void Engine::reduce_if_through(ShardedUnit& unit) {
  const Calls& calls = calls_of(unit);
  if (calls.num_pending > 0) return;
  // A repeated backward goes through an unknown number of calls, and a gradient that is reduced
  // once per cycle takes no second reduction: so it waits for the end.
  gradients_.reduce(unit,
                    calls.is_repeated ? Gradients::Which::kWithSlabs : Gradients::Which::kAll);
}

void Engine::gradient_ready(ShardedUnit& unit, ParamGroup& group, int64_t member,
                            const at::Tensor& gradient) {
  refuse_second_order();
  enter_backward();
  gradients_.accept(unit, group, member, gradient);
}

Gradients::DirectTarget Engine::direct_target(ShardedUnit& unit, ParamGroup& group, int64_t member,
                                              GradientType type) {
  // A unit that is used again later in this backward would keep its slab all that time.
  if (!in_backward_ || calls_of(unit).num_pending > 1) return {};
  return gradients_.direct_target(unit, group, member, type);
}

void Engine::end_backward() {
  end_calls_after(-1);
  // Reduces units that no call of this backward ended, and parameters outside units, whose last use
  // nothing tells.
  for (const auto& unit : units_) gradients_.reduce(*unit, Gradients::Which::kAll);
  close_backward();
  gradients_.end_backward();
  weights_.close_pass();
  weights_.release();
}

void Engine::close_backward() {
  for (Calls& calls : calls_) calls.is_repeated = false;
  open_calls_.clear();
  weights_.end_uses();
  in_backward_ = false;
  end_is_queued_ = false;
}

// --- updates -------------------------------------------------------------------------------------

std::shared_ptr<const std::string> Engine::seat_optimizer(std::string name) {
  if (const auto other = optimizer_.lock())
    throw UsageError(concat("the model has an optimizer already (", *other,
                            "), which updates all its parameters; use that one, or let go of it "
                            "first; rules in its options treat parameters differently"));
  auto seat = std::make_shared<const std::string>(std::move(name));
  optimizer_ = seat;
  return seat;
}

std::vector<ShardedUnit*> Engine::update_order() const {
  std::vector<ShardedUnit*> wanted;
  std::vector<bool> is_in(units_.size(), false);
  const auto add = [&](ShardedUnit& unit) {
    const auto index = static_cast<size_t>(unit.index());
    if (unit.is_trainable() && !is_in[index]) wanted.push_back(&unit);
    is_in[index] = true;
  };
  for (const auto& unit : units_)
    if (unit->kind() != UnitKind::kScheduled) add(*unit);
  for (const int32_t index : weights_.order().forward) add(*units_[static_cast<size_t>(index)]);
  for (const auto& unit : units_) add(*unit);  // units that never ran
  return wanted;
}

void Engine::begin_update(ShardedUnit& unit, Work update) {
  gradients_.expect_reader();
  unit.begin_update(std::move(update));
  // Nothing tells the next use of parameters outside units, so they are whole again before the
  // caller goes on.
  if (unit.kind() != UnitKind::kResident) return;
  unit.start_gather(SlabFrom::kBeside);
  unit.wait_gather();
  unit.wait_update();
}

void Engine::wait_updates() {
  for (const auto& unit : units_) unit->wait_update();
}

void Engine::cancel_updates() noexcept {
  for (const auto& unit : units_) {
    try {
      unit->wait_update();
    } catch (const std::exception& error) {
      // Only logged: the caller reports the first error, which caused this one.
      log(LogLevel::kDebug, "a cancelled update had failed: ", error.what());
    }
  }
}

Work Engine::sum_over_shards(const at::Tensor& tensor, GridKind kind, const Tag& tag,
                             Work after) const {
  const PlacementPair placed = options_.strategy.optimizer;
  const auto sum_along = [&](Placement placement, const MeshAxis& axis) {
    if (placement == Placement::kShard && axis.size() > 1)
      after = axis.reduce().all_reduce(tensor, {}, tag, after);
  };
  const Grid grid = mesh_.grid(kind);
  sum_along(placed.inner, *grid.inner);
  sum_along(placed.outer, *grid.outer);
  if (grid.owners != nullptr) sum_along(Placement::kShard, *grid.owners);
  return after;
}

// Units that stay whole are gathered within the step that updates them.
void Engine::expect_newer_weights() {
  for (const auto& unit : units_)
    if (unit->kind() != UnitKind::kResident)
      unit->expect_newer_weights(ShardedUnit::Which::kTrainable);
}

// --- between steps -------------------------------------------------------------------------------

void Engine::wait_gradients() {
  if (in_backward_) end_backward();
  gradients_.wait();
}

void Engine::wait() {
  wait_gradients();
  gradients_.heed_cleared();
  wait_updates();
}

void Engine::zero_grad() {
  wait_gradients();
  gradients_.zero();
}

void Engine::refuse_while_whole(const char* what) const {
  if (weights_.has_pins())
    throw UsageError(concat(what, " is called while all parameters are whole; leave ",
                            "Sharded::full_parameters() first"));
}

void Engine::end_cycle(const char* reader) {
  wait();
  gradients_.end_cycle(reader);
}

void Engine::refresh_weights() {
  refuse_while_whole("refresh_weights()");
  gradients_.expect_reader();  // the optimizer that changed the weights
  wait();
  weights_.release();
  for (const auto& unit : units_) {
    for (ParamGroup& group : unit->groups())
      if (group.is_trainable()) group.refresh();
    unit->expect_newer_weights(ShardedUnit::Which::kTrainable);
  }
  weights_.gather_residents();
}

void Engine::take_over_main_weights() {
  refuse_while_whole("loading");
  wait();
  weights_.release();
  for (const auto& unit : units_)
    for (ParamGroup& group : unit->groups())
      if (group.is_quantized())
        group.quantized().quantize(unit->name(), QuantizedWeights::After::kValues);
  for (const auto& unit : units_) unit->expect_newer_weights(ShardedUnit::Which::kAll);
  weights_.gather_residents();
}

bool Engine::found_nonfinite() {
  wait_gradients();
  return gradients_.found_nonfinite();
}

void Engine::set_grad_comm(std::optional<at::ScalarType> grad_comm) {
  PrecisionPolicy wanted = options_.precision;
  wanted.grad_comm = grad_comm;
  wait_gradients();
  gradients_.set_wire(wanted);
  options_.precision = wanted;
  weights_.change_wire();
}

void Engine::reset() {
  cancel_updates();
  weights_.cancel();
  gradients_.reset();
  if (slabs_.has_pool()) slabs_.pool().cancel_step();
  close_backward();
  ++generation_;
  for (Calls& calls : calls_) calls.num_pending = 0;
}

}  // namespace fsdp
