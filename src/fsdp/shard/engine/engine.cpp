#include "fsdp/shard/engine/engine.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/log.h"

namespace fsdp {

namespace {

MeshShape shape_of(const Grid& grid, Collectives collectives) {
  return {.outer = grid.outer->size(),
          .inner = grid.inner->size(),
          .force_collectives = collectives == Collectives::kAlways};
}

// Partial sums of the ranks of a tp or ep group must be the lowest levels of the tree: they are
// added within a lane, or lanes of one ep group within one product.
std::optional<LaneOrder> lane_order(const Mesh& mesh, const ShardOptions& options) {
  if (options.lanes == 0) return std::nullopt;
  const int64_t ep = mesh.ep() == nullptr ? 1 : mesh.ep()->size();
  const int64_t tp = mesh.size() / mesh.data_parallel_size();
  const bool are_added_at_once = options.strategy.gradient.inner == Placement::kShard;
  if (!is_power_of_two(ep * tp))
    throw UsageError(concat("lanes is ", options.lanes, " on a mesh with ep ", ep, " and tp ", tp,
                            ": they must be powers of two"));
  if ((ep > 1 || tp > 1) && (!are_added_at_once || ep > mesh.inner().size()))
    throw UsageError(concat("lanes is ", options.lanes, " on a mesh with ep ", ep, " and tp ", tp,
                            ", for which gradients must be sharded along the inner axis "
                            "(optim_grads, optim_grads_params), and ep ranks be in one row"));
  return LaneOrder::of(options.lanes, options.strategy,
                       {.outer = mesh.outer().size(), .inner = mesh.inner().size() / tp});
}

}  // namespace

Engine::Engine(const Mesh& mesh, const ShardOptions& options, c10::Device device)
    : mesh_(mesh),
      options_(options),
      device_(device),
      shape_(shape_of(mesh.grid(GridKind::kDense), options.collectives)),
      lanes_(lane_order(mesh, options)),
      registered_(make_user_buffer_memory(mesh, shape_, options, device)),
      memory_(options, device, registered_.get()),
      wire_slots_(memory_.of(MemoryKind::kReduction)),
      weights_(options_, device, units_, memory_.of(MemoryKind::kPool), registered_.get()),
      gradients_(options_, device, mesh, units_, wire_slots_, micro_steps()),
      calls_(units_, weights_, gradients_) {
  const int64_t data_parallel_size = mesh.data_parallel_size();
  for (const ParameterKindRow& row : kParameterKinds) {
    const Grid grid = mesh.grid(row.grid);
    const bool is_copied = row.kind == ParameterKind::kEqual;
    GroupSetting setting{.kind = row.kind,
                         .grid = grid,
                         .shape = shape_of(grid, options.collectives),
                         .rank = {.outer = grid.outer->rank(), .inner = grid.inner->rank()},
                         .num_losses = lanes_ ? lanes_->lanes : data_parallel_size,
                         .micro_steps = micro_steps(),
                         .num_copies = is_copied ? mesh.size() / data_parallel_size : 1,
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

int64_t Engine::lane() const {
  if (!lanes_) return 0;
  const int64_t tp = mesh_.size() / mesh_.data_parallel_size();
  return lanes_->lane({.outer = mesh_.outer().rank(), .inner = mesh_.inner().rank() / tp},
                      gradients_.microbatch() % lanes_->micro_steps);
}

Engine::~Engine() {
  cancel_updates(units_);
  weights_.cancel();
  gradients_.cancel();
  if (weights_.pool() != nullptr) weights_.pool()->cancel_step();
}

// --- construction --------------------------------------------------------------------------------

ShardedUnit& Engine::add_unit(std::string name, UnitKind kind) {
  units_.push_back(std::make_unique<ShardedUnit>(static_cast<int32_t>(units_.size()),
                                                 std::move(name), kind, shared_calls()));
  return *units_.back();
}

const GroupSetting& Engine::setting_of(UnitKind unit, ParameterKind parameters) const {
  const auto& settings = unit == UnitKind::kResident ? resident_settings_ : settings_;
  return settings[static_cast<size_t>(parameters)];
}

void Engine::complete() {
  calls_.complete(shared_calls());
  gradients_.complete();
  weights_.complete();
  renew_gradient_hooks();
}

void Engine::renew_gradient_hooks() {
  gradient_hooks_.reset();
  gradient_hooks_ = std::make_unique<GradientHooks>(shared_calls(), units_);
}

// --- between steps -------------------------------------------------------------------------------

void Engine::wait_gradients() {
  if (calls_.is_in_backward()) calls_.end_backward();
  gradients_.wait();
}

void Engine::wait() {
  wait_gradients();
  gradients_.detect_external_zero_grad();
  wait_updates(units_);
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
      if (QuantizedWeights* quantized = group.quantized()) quantized->quantize(unit->name());
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
  cancel_updates(units_);
  weights_.cancel();
  gradients_.reset();
  if (weights_.pool() != nullptr) weights_.pool()->cancel_step();
  calls_.reset();
}

}  // namespace fsdp
