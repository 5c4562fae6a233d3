#include "fsdp/optim/optimizer_impl.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/exact_sum.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/host_updates.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/optim/task_queue.h"
#include "fsdp/shard/engine/engine_memory.h"

namespace fsdp {

namespace {

StepRule step_rule(const UpdateRule& rule, const StepOptions& options) {
  StepRule step{.max_norm = options.max_norm,
                .skips_nonfinite = options.on_nonfinite == OnNonfinite::kSkip,
                .growth = options.loss_scale.growth,
                .backoff = options.loss_scale.backoff,
                .growth_interval = options.loss_scale.interval};
  if (const auto* adamw = std::get_if<AdamWRule>(&rule.math)) {
    step.beta1 = adamw->beta1;
    step.beta2 = adamw->beta2;
  }
  return step;
}

void check_types(const ParamGroup& group, const std::string& optimizer) {
  const auto is_updated = [](DType dtype) {
    return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  };
  const GroupTypes& types = group.types();
  const auto refuse = [&](const char* what, DType dtype, const char* fix) {
    throw UsageError(concat(optimizer, " cannot update parameter '", group.name_of(0), "', whose ",
                            what, " is ", name_of(dtype), "; ", fix));
  };
  if (!is_updated(types.weight)) refuse("dtype", types.weight, "use fp32, bf16 or fp16");
  if (!is_updated(types.main_grad))
    refuse("main gradient", types.main_grad, "set precision.main_grads to fp32, bf16 or fp16");
  if (types.main_weight && types.main_weight != DType::kFloat32)
    refuse("main weight", *types.main_weight, "set precision.main_params to fp32 or nullopt");
}

// Quantised groups compute with codes, of which receivers know nothing.
void check_has_weights(const ParamGroup& group) {
  if (group.types().is_quantized())
    throw UsageError(concat("step.marks_changes is true, but parameter '", group.name_of(0),
                            "' is quantised (", row_of(group.types().recipe).name,
                            "), so it has no weights whose bits a patch could bring; train it with "
                            "weights in bf16, fp16 or fp32"));
}

}  // namespace

Optimizer::Impl::Impl(const Sharded& sharded, UpdateRule rule, const StepOptions& options)
    : sharded_(sharded),
      engine_(sharded),
      rule_(std::move(rule)),
      registration_(engine_.register_optimizer(rule_.name)),
      options_(options),
      step_rule_(step_rule(rule_, options)),
      learning_rate_(rule_.learning_rate),
      team_(at::get_num_threads()) {
  if (const std::string difference = difference_of(engine_.mesh(), rule_.facts);
      !difference.empty())
    throw UsageError(
        concat(difference, "; make the optimizer with the same options on every rank"));
  options_.validate();
  set_learning_rate(learning_rate_);
  engine_.wait();
  state_ = at::zeros({static_cast<int64_t>(sizeof(StepState))},
                     at::device(engine_.device()).dtype(at::kByte));
  norm_ = field_of(state_, offsetof(StepState, squared_norm));
  grid_norms_ = {norm_};
  while (grid_norms_.size() < engine_.mesh().grids().size())
    grid_norms_.push_back(at::zeros_like(norm_));
  rate_on_device_ = field_of(state_, offsetof(StepState, learning_rate));
  loss_scale_ = field_of(state_, offsetof(StepState, loss_scale));
  if (!engine_.device().is_cpu())
    workspace_ =
        at::empty({squared_sum_workspace_numel()}, at::device(engine_.device()).dtype(at::kDouble));
  set_state({.loss_scale = options.loss_scale.initial});
  add_units();
  updates_queue_ = std::make_unique<TaskQueue>(engine_.device());
  if (engine_.options().offload.fraction > 0.0) {
    on_host_ = std::make_unique<HostUpdates>(engine_.memory(), engine_.device(),
                                             engine_.options().offload, rule_.math);
    for (const UnitUpdate& unit : units_) on_host_->reserve(unit.groups);
  }
}

Optimizer::Impl::~Impl() {
  // The engine must not wait for updates that end with this object.
  if (updates_queue_) engine_.cancel();
}

void Optimizer::Impl::add_units() {
  std::vector<ParameterTraits> traits;
  for (const auto& unit : engine_.units())
    for (ParamGroup& group : unit->groups())
      if (group.is_trainable()) {
        check_types(group, rule_.name);
        if (options_.marks_changes) check_has_weights(group);
        for (const GroupMember& member : group.members())
          traits.push_back({member.names, member.parameter.dim()});
      }
  if (traits.empty())
    throw UsageError(
        concat(rule_.name, " has nothing to update; the model has no trainable parameter"));
  std::vector<HyperParameters> hyper = apply_rules(rule_.parameters, traits);
  std::span<HyperParameters> rest = hyper;
  const ChangeMarks marks = options_.marks_changes ? ChangeMarks::kKept : ChangeMarks::kNone;
  uint64_t number = 0;
  for (const auto& unit : engine_.units()) {
    UnitUpdate& update = units_.emplace_back(UnitUpdate{unit.get(), {}});
    for (ParamGroup& group : unit->groups()) {
      if (!group.is_trainable()) continue;
      const std::span<HyperParameters> own = rest.first(group.members().size());
      rest = rest.subspan(own.size());
      if (rule_.matrices && group.has_matrices()) {
        update.groups.emplace_back(group, number++, own, std::vector{rule_.matrices->momentum_kind},
                                   GroupUpdate::Spans::kMatrices, marks, engine_.memory());
        continue;
      }
      for (HyperParameters& each : own) each.rate_scale *= rate_scale_beside_matrices();
      update.groups.emplace_back(group, number++, own, rule_.moments, GroupUpdate::Spans::kLong,
                                 marks, engine_.memory());
    }
  }
  if (!rule_.matrices) return;
  matrices_.emplace(*rule_.matrices, engine_.memory(), engine_.device());
  for (const UnitUpdate& unit : units_) matrices_->reserve(unit.groups);
}

void Optimizer::Impl::set_learning_rate(double rate) {
  if (!std::isfinite(rate) || rate < 0.0)
    throw UsageError(concat("lr is ", rate, "; use a finite number of 0 or more"));
  rate_changed_ |= rate != learning_rate_;
  learning_rate_ = rate;
}

void Optimizer::Impl::set_rule(size_t index, double weight_decay, double rate_scale) {
  if (index >= rule_.parameters.rules.size())
    throw UsageError(concat("rule ", index, " does not exist; there are ",
                            rule_.parameters.rules.size(), " in the options"));
  ParameterRuleOptions{.rules = {{.pattern = rule_.parameters.rules[index].pattern,
                                  .weight_decay = weight_decay,
                                  .rate_scale = rate_scale}}}
      .validate();
  wait();  // updates under way read the numbers of rules
  ++num_rule_changes_;
  for (UnitUpdate& unit : units_)
    for (GroupUpdate& group : unit.groups)
      for (UpdatePiece& piece : group.pieces())
        piece.set_rule(
            static_cast<int32_t>(index), weight_decay,
            is_of_matrices(group) ? rate_scale : rate_scale * rate_scale_beside_matrices());
}

void Optimizer::Impl::set_momenta(const Momenta& momenta) {
  const auto set = [&](const char* field, const std::optional<double>& wanted, double& number) {
    if (!wanted) return;
    if (!(*wanted >= 0.0 && *wanted < 1.0))
      throw UsageError(concat(rule_.name, "'s ", field, " is ", *wanted,
                              "; use a number from 0 up to, but not, 1"));
    number = *wanted;
  };
  UpdateRule rule = rule_;
  if (auto* adamw = std::get_if<AdamWRule>(&rule.math)) {
    set("beta1", momenta.beta1, adamw->beta1);
    set("beta2", momenta.beta2, adamw->beta2);
    if (rule.matrices) set("momentum", momenta.momentum, rule.matrices->momentum);
  } else {
    auto& sgd = std::get<SgdRule>(rule.math);
    set("momentum", momenta.momentum, sgd.momentum);
    if ((sgd.momentum > 0.0) == rule.moments.empty())
      throw UsageError(concat(
          "SGD's momentum is to become ", sgd.momentum, ", but the optimizer was made ",
          rule.moments.empty() ? "without one" : "with one",
          ", and its memory is there or not; make it with a momentum above 0, which can change"));
  }
  wait();  // updates under way read these numbers
  ++num_rule_changes_;
  rule_ = std::move(rule);
  step_rule_ = step_rule(rule_, options_);
  if (matrices_) matrices_->set_momentum(rule_.matrices->momentum);
  if (on_host_) on_host_->set_math(rule_.math);
  // The corrections of averages are those of the new numbers for all steps so far, as in torch;
  // computed where the state is, so that nobody waits for it.
  const at::Tensor steps = field_of(state_, offsetof(StepState, step), at::kLong);
  begun_.wait();
  field_of(state_, offsetof(StepState, beta1_power)).copy_(at::pow(step_rule_.beta1, steps));
  field_of(state_, offsetof(StepState, beta2_power)).copy_(at::pow(step_rule_.beta2, steps));
}

void Optimizer::Impl::tell_learning_rate() {
  if (std::exchange(rate_changed_, false)) rate_on_device_.fill_(learning_rate_);
}

void Optimizer::Impl::wait_for_step() {
  wait();
  std::exchange(begun_, {}).wait();
}

bool Optimizer::Impl::needs_norm() const {
  return options_.measures_norm || step_rule_.max_norm > 0.0 || step_rule_.skips_nonfinite ||
         has_dynamic_scale(step_rule_);
}

// --- a step --------------------------------------------------------------------------------------

void Optimizer::Impl::step() {
  RECORD_FUNCTION("fsdp::step", {});
  engine_.begin_step("step()");
  if (options_.without_gradient == WithoutGradient::kSkip) {
    engine_.find_missing();
    leave_out_missing();
  }
  begun_ = begin(needs_norm() ? start_norm() : Work());
  if (on_host_) on_host_->begin(state_, begun_);
  std::vector<UnitUpdate*> order;
  for (const ShardedUnit* unit : engine_.order())
    order.push_back(&units_[static_cast<size_t>(unit->index())]);
  // The host's chunks of all units are queued first: on a device this thread waits for those of a
  // unit before it can launch the quantising of the unit.
  std::vector<Work> updated;
  if (on_host_)
    for (UnitUpdate* unit : order) updated.push_back(update_unit(*unit));
  // Quantised weights wait for the amaxes of other ranks: meanwhile the next unit is updated.
  std::optional<StartedUpdate> last;
  for (size_t i = 0; i < order.size(); ++i) {
    StartedUpdate next =
        start_update(*order[i], on_host_ ? std::move(updated[i]) : update_unit(*order[i]));
    if (last) end_update(*std::exchange(last, std::nullopt));
    if (next.quantized.empty())
      end_update(std::move(next));
    else
      last = std::move(next);
  }
  if (last) end_update(std::move(*last));
  if (options_.updates == Updates::kBlocking || (on_host_ && !engine_.options().offload.overlap))
    engine_.wait_updates();
}

void Optimizer::Impl::leave_out_missing() {
  const std::vector<GroupUpdate*> updates = group_updates();
  if (std::none_of(updates.begin(), updates.end(),
                   [](const GroupUpdate* update) { return update->misses_others(); }))
    return;
  wait();  // updates under way read what is left out
  const int64_t step = state().step;
  for (GroupUpdate* update : updates) update->leave_out_missing(step);
}

Work Optimizer::Impl::start_norm() {
  std::vector<Work> all;
  for (const GridKind grid : engine_.mesh().grids())
    all.push_back(start_norm(grid, grid_norms_[all.size()]));
  if (all.size() == 1) return all.front();
  return updates_queue_->run(
      [this] {
        for (size_t i = 1; i < grid_norms_.size(); ++i) norm_.add_(grid_norms_[i]);
      },
      all);
}

// Under lanes: by whole numbers, which say nothing of who owns what. Shards begin and end between
// blocks, pieces of an offloaded one may not.
Work Optimizer::Impl::start_exact_norm(GridKind grid, const at::Tensor& norm) {
  std::vector<at::Tensor> gradients;
  for (const UnitUpdate& unit : units_)
    for (const GroupUpdate& update : unit.groups) {
      const ParamGroup& group = update.group();
      if (row_of(group.setting().kind).grid != grid) continue;
      for (const ShardRange& range :
           group.layout().shard_ranges(group.setting().strategy.optimizer, group.setting().rank))
        gradients.push_back(group.gradient().main().at(range.flat));
    }
  static_assert(kScaleBlock % kExactBlock == 0,
                "shards of lanes begin at multiples of kScaleBlock");
  // Kept from step to step: tasks use it on a stream of their own.
  at::Tensor& digits = grid_digits_[static_cast<size_t>(grid)];
  if (!digits.defined())
    digits = at::zeros({ExactSum::kCount}, at::device(norm.device()).dtype(at::kLong));
  Work last = updates_queue_->run([this, digits, gradients = std::move(gradients)] {
    digits.zero_();
    for (const at::Tensor& gradient : gradients) add_exact_squares(gradient, digits, team_);
  });
  last = engine_.sum_over_shards(digits, grid, "gradient norm", last);
  return updates_queue_->run([digits, norm] { read_exact_sum(digits, norm); }, std::span(&last, 1));
}

Work Optimizer::Impl::start_norm(GridKind grid, const at::Tensor& norm) {
  if (engine_.options().lanes > 0) return start_exact_norm(grid, norm);
  // Read here: when the task runs, the next cycle may have begun.
  std::vector<at::Tensor> known;
  std::vector<at::Tensor> unknown;
  for (const UnitUpdate& unit : units_)
    for (const GroupUpdate& update : unit.groups) {
      if (row_of(update.group().setting().kind).grid != grid) continue;
      if (const at::Tensor squares = update.group().gradient().squares(); squares.defined()) {
        known.push_back(squares);
      } else {
        for (const UpdatePiece& piece : update.pieces())
          unknown.push_back(update.gradient_of(piece));
      }
    }
  const Work last =
      updates_queue_->run([this, norm, known = std::move(known), unknown = std::move(unknown)] {
        norm.zero_();
        for (const at::Tensor& squares : known) norm.add_(squares);
        for (const at::Tensor& gradient : unknown)
          add_squared_norm(gradient, norm, workspace_, team_);
      });
  return engine_.sum_over_shards(norm, grid, "gradient norm", last);
}

Work Optimizer::Impl::begin(Work norm) {
  const std::optional<double> new_rate =
      std::exchange(rate_changed_, false) ? std::optional(learning_rate_) : std::nullopt;
  return updates_queue_->run(
      [this, new_rate] {
        if (new_rate) rate_on_device_.fill_(*new_rate);
        auto* state = static_cast<StepState*>(state_.mutable_data_ptr());
        if (state_.is_cpu())
          begin_step(*state, step_rule_);
        else
          begin_step_on_device(state, step_rule_, current_stream(state_.device()).native_handle());
        if (matrices_) matrices_->begin(state_);
      },
      std::span(&norm, 1));
}

void Optimizer::Impl::update_piece(const GroupUpdate& update, const UpdatePiece& piece) {
  const at::Tensor gradient = update.gradient_of(piece);
  const auto* first = static_cast<const std::byte*>(gradient.const_data_ptr());
  update.for_each_updated(piece, [&](UpdateSpan span) {
    const int64_t begin = span.flat_begin - piece.main().flat.begin;
    span.gradient = first + begin * static_cast<int64_t>(gradient.element_size());
    update_span(span, rule_.math, state_, team_);
  });
}

Work Optimizer::Impl::update_unit(UnitUpdate& unit) {
  const Work work = updates_queue_->run([this, &unit] {
    RECORD_FUNCTION("fsdp::update_unit", {});
    for (const GroupUpdate& update : unit.groups) {
      if (is_of_matrices(update)) {
        matrices_->run(update, workspace_, team_);
        continue;
      }
      for (const UpdatePiece& piece : update.pieces())
        if (!piece.main().is_offloaded) update_piece(update, piece);
    }
  });
  return on_host_ ? on_host_->run(unit.groups, work) : work;
}

Optimizer::Impl::StartedUpdate Optimizer::Impl::start_update(UnitUpdate& unit, Work updated) {
  StartedUpdate started{.unit = &unit, .updated = std::move(updated)};
  for (const GroupUpdate& update : unit.groups)
    if (QuantizedWeights* quantized = update.group().quantized())
      started.quantized.push_back(quantized);
  if (started.quantized.empty()) return started;
  started.updated = updates_queue_->run(
      [all = started.quantized] {
        for (QuantizedWeights* weights : all) weights->measure();
      },
      std::span(&started.updated, 1));
  for (QuantizedWeights* weights : started.quantized)
    started.combined.push_back(weights->start_combining("amaxes", started.updated));
  return started;
}

void Optimizer::Impl::end_update(StartedUpdate started) {
  Work work = std::move(started.updated);
  if (!started.quantized.empty())
    work = updates_queue_->run(
        [all = std::move(started.quantized)] {
          RECORD_FUNCTION("fsdp::quantize_unit", {});
          for (QuantizedWeights* weights : all) weights->cast();
        },
        started.combined);
  engine_.begin(*started.unit->unit, std::move(work));
}

// --- what others see -----------------------------------------------------------------------------

void Optimizer::Impl::wait() const { engine_.wait_updates(); }

StepState Optimizer::Impl::state() const {
  begun_.wait();
  const at::Tensor bytes = state_.cpu();
  return *static_cast<const StepState*>(bytes.const_data_ptr());
}

double Optimizer::Impl::gradient_norm() const {
  if (!needs_norm())
    throw UsageError("gradient_norm() was not computed; set step.max_norm or step.measures_norm");
  return state().norm;
}

at::Tensor Optimizer::Impl::scaled(const at::Tensor& loss) const {
  if (options_.loss_scale.initial == 1.0 && !has_dynamic_scale(step_rule_)) return loss;
  begun_.wait();
  // A copy: autograd keeps it until the backward, and the scale may change before that.
  return loss * loss_scale_.to(loss.scalar_type(), false, /*copy=*/true).squeeze();
}

void Optimizer::Impl::set_state(const StepState& state) {
  wait();
  StepState all{.learning_rate = learning_rate_, .step = state.step, .skipped = state.skipped};
  all.loss_scale = state.loss_scale;
  all.good_steps = state.good_steps;
  // Computes the powers as a run of that many steps would, bit by bit. They end at fixed numbers.
  for (int64_t i = 0; i < state.step; ++i) {
    const double before1 = std::exchange(all.beta1_power, all.beta1_power * step_rule_.beta1);
    const double before2 = std::exchange(all.beta2_power, all.beta2_power * step_rule_.beta2);
    if (all.beta1_power == before1 && all.beta2_power == before2) break;
  }
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(StepState))}, at::kByte);
  *static_cast<StepState*>(bytes.mutable_data_ptr()) = all;
  state_.copy_(bytes);
}

}  // namespace fsdp
