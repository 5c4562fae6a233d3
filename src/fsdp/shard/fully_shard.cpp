#include "fsdp/shard/fully_shard.h"

#include <ATen/ATen.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/layout/matrix_owners.h"
#include "fsdp/shard/engine/engine.h"
#include "fsdp/shard/module_units.h"
#include "fsdp/shard/option_fields.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/shard/parameter_traits.h"

namespace fsdp {

namespace {

// --- what ranks must agree on --------------------------------------------------------------------

// The sum of the elements' bits, exact and independent of the order of summation.
at::Tensor checksum(const at::Tensor& value) {
  // Piece by piece, because a wide sum of narrow numbers on the CPU first makes a wide copy.
  constexpr int64_t kPiece = int64_t{1} << 20;
  const at::Tensor flat = value.detach().contiguous().view({-1});
  const int64_t width = flat.element_size();
  const at::Tensor bits = flat.view(width == 1   ? at::kByte
                                    : width == 2 ? at::kShort
                                    : width == 4 ? at::kInt
                                                 : at::kLong);
  at::Tensor sum = at::zeros({}, bits.options().dtype(at::kLong));
  for (const at::Tensor& piece : bits.split(kPiece)) sum += piece.sum(at::kLong);
  return sum;
}

// The options, by the names of their fields, then every parameter in the order of the shards'
// layout. `device` is the device of the buffers.
RankFacts shard_facts(const ShardOptions& options, c10::Device device, const ModuleUnits& found) {
  ShardOptions compared = options;
  compared.device = device;
  RankFacts facts = option_facts(compared);
  int64_t number = 0;
  for (const FoundUnit& unit : found.units)
    for (const OwnedParameter& parameter : unit.parameters) {
      const at::Tensor& tensor = parameter.tensor;
      const std::string declared = to_text(parameter.declared);
      facts.emplace_back(
          concat("parameter ", number++),
          concat(join(parameter.names, " = "), " ", c10::toString(tensor.scalar_type()), " ",
                 list_text(tensor.sizes()), tensor.requires_grad() ? "" : " frozen",
                 declared.empty() ? "" : " ", declared,
                 unit.unit == nullptr ? " outside any unit" : concat(" of unit ", unit.name)));
    }
  return facts;
}

bool is_first_rank(const Mesh& mesh) {
  return mesh.outer().rank() == 0 && mesh.inner().rank() == 0;
}

// Every rank keeps its own part of a value. If ranks built different values, the model would be a
// patchwork of them, and nothing would ever report it.
class ValueAgreement {
 public:
  ValueAgreement(const Mesh& mesh, InitialValues from) : mesh_(mesh), from_(from) {}

  // Whether this rank's values are used, so that it must make them.
  bool are_made_here() const {
    return from_ == InitialValues::kOfEveryRank || is_first_rank(mesh_);
  }

  // All ranks call these with the same parameters in the same order.
  // Remembers a value for check_agreement(), if all ranks must have the same.
  void note(const at::Tensor& value, const std::string& name) {
    if (mesh_.size() == 1 || from_ != InitialValues::kOfEveryRank) return;
    names_.push_back(name);
    checksums_.push_back(checksum(value));
  }

  // The value to use.
  at::Tensor agreed(const at::Tensor& value, const std::string& name) const {
    if (mesh_.size() == 1 || from_ == InitialValues::kOfEveryRank) return value;
    const at::Tensor agreed = value.detach().contiguous();
    // Down the column of rank 0, then along every row.
    for (const MeshAxis* axis : {&mesh_.outer(), &mesh_.inner()})
      if (axis->size() > 1) axis->gather().broadcast(agreed, 0, name).wait();
    return agreed;
  }

  // Throws an Error that names the first parameter noted since the last call whose values differ
  // between ranks.
  void check_agreement() {
    if (checksums_.empty()) return;
    const at::Tensor own = at::stack(std::exchange(checksums_, {}));
    const std::vector<std::string> names = std::exchange(names_, {});
    at::Tensor lowest = own.clone();
    at::Tensor highest = own.clone();
    for (const MeshAxis* axis : {&mesh_.inner(), &mesh_.outer()}) {
      if (axis->size() == 1) continue;
      axis->gather().all_reduce(lowest, {.op = ReduceOp::kMin}, "initial values").wait();
      axis->gather().all_reduce(highest, {.op = ReduceOp::kMax}, "initial values").wait();
    }
    const at::Tensor differs = lowest.ne(highest).cpu();
    for (size_t i = 0; i < names.size(); ++i)
      FSDP_CHECK(!differs[static_cast<int64_t>(i)].item<bool>(), "parameter '", names[i],
                 "' has different values on different ranks; build the model from the same seed or "
                 "file everywhere, or set initial_values to kOfRankZero");
  }

 private:
  const Mesh& mesh_;
  const InitialValues from_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> checksums_;
};

// --- from a module tree to units -----------------------------------------------------------------

c10::Device device_for(const torch::nn::Module& model, const ShardOptions& options) {
  if (options.device) return *options.device;
  for (const at::Tensor& parameter : model.parameters())
    if (!parameter.is_meta()) return parameter.device();
  return c10::kCPU;
}

// Members of one kind, dtype, recipe, trainability and way to be cut, in the order of the tree.
struct GroupKey {
  ParameterKind kind;
  at::ScalarType dtype;
  WeightRecipe recipe;
  bool is_trainable;
  bool has_matrices;
  friend bool operator==(const GroupKey&, const GroupKey&) = default;
};

class Builder {
 public:
  Builder(std::shared_ptr<Engine> engine, ModuleUnits found)
      : engine_(std::move(engine)),
        found_(std::move(found)),
        values_(engine_->mesh(), engine_->options().initial_values),
        recipes_(engine_->options().quantization),
        matrices_(engine_->options().matrices) {}

  void build() {
    place_parameters();
    compare_values();
    for (const FoundModule& found : found_.modules) join_ranks(*found.module, engine_->mesh());
    for (const FoundUnit& unit : found_.units) add_unit(unit);
    deal_matrices_of_grids();
    for (NewGroup& group : new_groups_) add_group(group);
    recipes_.check_all_are_used(found_);
    matrices_.check_all_are_used(found_);
    connect();
    // Decided before any is initialised: a module whose only parameter is shared with an earlier
    // one draws random numbers, too.
    std::vector<bool> needs_init;
    for (const FoundModule& found : found_.modules) needs_init.push_back(is_on_meta(*found.module));
    for (size_t i = 0; i < needs_init.size(); ++i) {
      if (needs_init[i]) materialize(found_.modules[i]);
      adopt_module(*found_.modules[i].module, needs_init[i]);
    }
    values_.check_agreement();
    engine_->complete();
    if (recipes_.quantizes()) engine_->take_over_main_weights();
    for (const FoundUnit& found : found_.units)
      if (!found.is_outside()) attach(found);
    report_residents();
  }

 private:
  struct NewGroup {
    ShardedUnit* unit;
    GroupKey key;
    std::vector<GroupMember> members;
    FlatLayoutRequest request;

    Trainable trainable() const { return key.is_trainable ? Trainable::kYes : Trainable::kNo; }
  };

  struct Place {
    ParamGroup* group;
    int64_t member;
    bool has_value = false;
  };

  // All of them before any module learns of it: an error leaves the modules as they were.
  void place_parameters() {
    for (const FoundUnit& unit : found_.units)
      for (const OwnedParameter& each : unit.parameters)
        placed_[each.tensor.unsafeGetTensorImpl()] =
            place_on(engine_->mesh(), each.declared, each.names.front(), each.tensor.sizes());
  }

  // Before any parameter changes, too. Those on the meta device have no values yet.
  void compare_values() {
    for (const FoundUnit& unit : found_.units)
      for (const OwnedParameter& each : unit.parameters)
        if (!each.tensor.is_meta()) values_.note(each.tensor, each.names.front());
    values_.check_agreement();
  }

  static UnitKind kind_of(const FoundUnit& unit) {
    if (unit.is_outside()) return UnitKind::kResident;
    return unit.encloses_units ? UnitKind::kEnclosing : UnitKind::kScheduled;
  }

  // Its groups are collected, to be added when the owners of all matrices are known.
  void add_unit(const FoundUnit& found) {
    ShardedUnit& unit = engine_->add_unit(found.name, kind_of(found));
    const size_t first = new_groups_.size();
    for (const OwnedParameter& parameter : found.parameters) {
      const at::ScalarType built_as = parameter.tensor.scalar_type();
      const at::ScalarType computes_in =
          at::isFloatingType(built_as) ? engine_->options().precision.params.value_or(built_as)
                                       : built_as;
      const PlacedParameter& placed = placed_.at(parameter.tensor.unsafeGetTensorImpl());
      const WeightRecipe recipe = recipes_.of(parameter, placed.owned);
      std::vector<int64_t> rows = matrices_.rows_of(parameter, placed);
      const GroupKey key{placed.kind, computes_in, recipe, parameter.tensor.requires_grad(),
                         !rows.empty()};
      auto it =
          std::find_if(new_groups_.begin() + static_cast<std::ptrdiff_t>(first), new_groups_.end(),
                       [&](const NewGroup& group) { return group.key == key; });
      if (it == new_groups_.end()) it = new_groups_.insert(it, {&unit, key, {}, {}});
      it->members.push_back({parameter.names, parameter.tensor, built_as, computes_in, placed.owned,
                             recipe, std::move(rows)});
    }
    for (size_t i = first; i < new_groups_.size(); ++i) {
      NewGroup& group = new_groups_[i];
      group.request = layout_request(group.members, group.trainable(), setting_of(group));
    }
  }

  const GroupSetting& setting_of(const NewGroup& group) const {
    return engine_->setting_of(group.unit->kind(), group.key.kind);
  }

  void deal_matrices_of_grids() {
    for (const GridKind grid : kGridKinds) {
      std::vector<FlatLayoutRequest*> requests;
      for (NewGroup& group : new_groups_)
        if (row_of(group.key.kind).grid == grid) requests.push_back(&group.request);
      deal_matrices(requests);
    }
  }

  void add_group(NewGroup& added) {
    // The load of whole tensors on each rank of the grid so far.
    std::vector<int64_t>& held = held_numel_[static_cast<size_t>(row_of(added.key.kind).grid)];
    const FlatLayoutRequest& request = added.request;
    const bool has_whole_tensors =
        request.granularity.kind == Granularity::Kind::kTensor && !added.key.has_matrices;
    if (has_whole_tensors) {
      held.resize(static_cast<size_t>(request.inner_ranks * request.outer_ranks), 0);
      added.request.held_load = held;
    }
    ParamGroup& group = added.unit->add_group(std::move(added.members), added.trainable(),
                                              setting_of(added), std::move(added.request));
    for (size_t i = 0; i < group.members().size(); ++i)
      places_[group.members()[i].parameter.unsafeGetTensorImpl()] = {&group,
                                                                     static_cast<int64_t>(i)};
    if (!has_whole_tensors) return;
    for (const Segment& segment : group.layout().segments())
      for (const Segment::UnevenShare& share : segment.uneven_shares())
        held[static_cast<size_t>(share.index)] += share.numel;
  }

  void connect() {
    for (size_t i = 0; i < found_.units.size(); ++i) {
      ShardedUnit& unit = *engine_->units()[i];
      std::vector<ShardedUnit*> needs;
      for (const int32_t other : found_.units[i].shares_with)
        needs.push_back(engine_->units()[static_cast<size_t>(other)].get());
      unit.connect(std::move(needs),
                   unit.kind() == UnitKind::kEnclosing && found_.units[i].parent < 0);
    }
  }

  // Brings the values of one module's own parameters into the shards. At most one module of a meta
  // model is whole at a time.
  void adopt_module(torch::nn::Module& module, bool is_initialized_here) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      Place& place = places_.at(item.value().unsafeGetTensorImpl());
      // A shared parameter has the value of its first module; the second module's initialisation
      // goes to scratch memory, so that the random numbers after it are the same.
      if (!std::exchange(place.has_value, true)) {
        const std::string& name = place.group->name_of(place.member);
        if (is_initialized_here) values_.note(item.value(), name);
        place.group->set_value(place.member, values_.agreed(item.value(), name));
      }
      place.group->attach(place.member);
    }
    move_buffers(module);
  }

  static bool is_on_meta(const torch::nn::Module& module) {
    for (const auto& tensors : {module.parameters(/*recurse=*/false), module.buffers(false)})
      for (const at::Tensor& tensor : tensors)
        if (tensor.defined() && tensor.is_meta()) return true;
    return false;
  }

  void materialize(const FoundModule& found) {
    const auto replace = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      // In the type in which models are constructed: a converted model has the rounded values.
      const at::ScalarType dtype = at::isFloatingType(tensor.scalar_type())
                                       ? c10::get_default_dtype_as_scalartype()
                                       : tensor.scalar_type();
      const at::Tensor value =
          at::empty(tensor.sizes(), at::device(engine_->device()).dtype(dtype));
      tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
    };
    for (const at::Tensor& tensor : found.module->parameters(false)) replace(tensor);
    for (const at::Tensor& tensor : found.module->buffers(false))
      if (tensor.defined() && tensor.is_meta()) replace(tensor);
    const at::NoGradGuard no_grad;
    if (values_.are_made_here()) initialize_parameters(*found.module, found.name);
  }

  void move_buffers(torch::nn::Module& module) const {
    for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
      if (!buffer.defined() || buffer.device() == engine_->device()) continue;
      buffer.unsafeGetTensorImpl()->shallow_copy_from(
          buffer.to(engine_->device()).getIntrusivePtr());
    }
  }

  void attach(const FoundUnit& found) {
    ShardedUnit& unit = *engine_->units()[static_cast<size_t>(&found - found_.units.data())];
    if (found.unit != nullptr)
      found.unit->attach(engine_->hooks_of(unit));
    else
      unit.answer_for(*found.module);
  }

  void report_residents() const {
    if (!found_.units.back().is_outside()) return;
    std::vector<std::string> names;
    for (const OwnedParameter& parameter : found_.units.back().parameters)
      names.push_back(concat("'", parameter.names.front(), "'"));
    constexpr size_t kShown = 5;
    const size_t num_more = names.size() > kShown ? names.size() - kShown : 0;
    names.resize(names.size() - num_more);
    // One rank has everything whole anyway.
    if (engine_->mesh_shape() == MeshShape{} || !is_first_rank(engine_->mesh())) return;
    log(LogLevel::kInfo,
        "parameters outside any unit stay whole between steps: ", join(names, ", "),
        num_more > 0 ? concat(" and ", num_more, " more") : std::string(),
        "; declare the module that uses them as fsdp::Unit, or name it in units, to shard them");
  }

  const std::shared_ptr<Engine> engine_;
  const ModuleUnits found_;
  ValueAgreement values_;
  ParameterRecipes recipes_;
  ParameterMatrices matrices_;
  std::vector<NewGroup> new_groups_;
  std::array<std::vector<int64_t>, kGridKinds.size()> held_numel_;
  std::unordered_map<const void*, PlacedParameter> placed_;
  std::unordered_map<const void*, Place> places_;
};

}  // namespace

Sharded fully_shard(const std::shared_ptr<torch::nn::Module>& model, const Mesh& mesh,
                    const ShardOptions& options) {
  FSDP_CHECK(model != nullptr, "the model is null; build it first");
  ModuleUnits found = find_units(model, options);
  for (const auto& item : model->named_parameters())
    FSDP_CHECK(!has_gradient_hook(item.value()), "parameter '", item.key(),
               "' is already sharded; a model can be sharded once");
  const c10::Device device = device_for(*model, options);
  // Comes first, so that a fault of one rank is an error on all.
  if (const std::string difference = difference_of(mesh, shard_facts(options, device, found));
      !difference.empty())
    throw UsageError(
        concat(difference, "; call fully_shard() with the same model and options on every rank"));
  options.validate();
  if (options.quantization.recipe != WeightRecipe::kPlain && options.offload.fraction > 0.0 &&
      !options.offload.pin && !device.is_cpu())
    throw UsageError(
        "offload.pin is false, but weights are quantised on the device, which reads main weights "
        "of the host only where they are page-locked; set it to true");
  auto engine = std::make_shared<Engine>(mesh, options, device);
  Builder(engine, std::move(found)).build();
  return Sharded(engine);
}

}  // namespace fsdp
