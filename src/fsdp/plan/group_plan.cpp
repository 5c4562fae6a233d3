#include "fsdp/plan/group_plan.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/matrix_owners.h"

namespace fsdp {

namespace {

bool shards_outer_axis(const Strategy& strategy) {
  return strategy.parameter.outer == Placement::kShard ||
         strategy.gradient.outer == Placement::kShard ||
         strategy.optimizer.outer == Placement::kShard;
}

void check_floating(const char* field, std::optional<DType> dtype) {
  if (dtype && !is_floating(*dtype))
    throw UsageError(concat(field, " is ", name_of(*dtype), "; it must be a floating dtype"));
}

// Updates compute in fp32, so moments of a wider type would be wasted.
void check_moment(const char* field, std::optional<DType> dtype) {
  if (dtype && (!is_floating(*dtype) || *dtype == DType::kFloat64))
    throw UsageError(concat(field, " is ", name_of(*dtype),
                            "; it must be fp32, bf16, fp16, fp8_e4m3, fp8_e5m2 or none"));
}

// A rank's part of a tensor before it is sharded. Slices are equal: group_tensors() has checked.
std::vector<int64_t> owned_shape(const TensorShape& tensor, ParameterKind kind, int64_t owners) {
  std::vector<int64_t> shape = tensor.shape;
  if (kind == ParameterKind::kExpert) shape[0] /= owners;
  if (kind == ParameterKind::kTensor) shape[static_cast<size_t>(tensor.cut->dim)] /= owners;
  return shape;
}

// Does what ParameterRecipes does in the engine.
class PlannedRecipes {
 public:
  PlannedRecipes(const ModelShape& model, const PlanOptions& options)
      : model_(model), options_(options), is_used_(options.weights_except.size(), false) {}

  WeightRecipe of(const TensorShape& tensor) {
    bool is_excepted = false;
    for (size_t i = 0; i < is_used_.size(); ++i)
      if (matches_glob(options_.weights_except[i], tensor.name)) is_excepted = is_used_[i] = true;
    if (!tensor.is_quantizable || is_excepted) return WeightRecipe::kPlain;
    quantizes_ = true;
    return options_.weights;
  }

  void check_all_are_used() const {
    for (size_t i = 0; i < is_used_.size(); ++i)
      if (!is_used_[i]) refuse_unmatched("weights_except", options_.weights_except[i], model_);
    if (options_.weights == WeightRecipe::kPlain || quantizes_) return;
    throw UsageError(concat("weights is ", row_of(options_.weights).name, ", but model '",
                            shown(model_.name),
                            "' names no matrix of a linear layer or of experts; leave it out"));
  }

 private:
  const ModelShape& model_;
  const PlanOptions& options_;
  std::vector<bool> is_used_;
  bool quantizes_ = false;
};

// Scales of one byte belong to whole blocks of a rank's rows.
void check_blocks(const UnitShape& unit, const TensorGroup& group,
                  const std::vector<std::vector<int64_t>>& shapes) {
  const WeightRecipeRow& row = row_of(group.recipe);
  if (row.scale_bytes != 1) return;
  for (size_t i = 0; i < shapes.size(); ++i)
    if (shapes[i][1] % row.scale_columns != 0)
      throw UsageError(concat(
          "tensor '", shown(unit.tensors[static_cast<size_t>(group.tensors[i])].name), "' has ",
          shapes[i][1], " columns on a rank, which blocks of ", row.scale_columns, " (", row.name,
          ") do not divide; leave it plain by weights_except, or choose "
          "another recipe"));
}

bool is_of_muon(const TensorShape& tensor, const PlanOptions& options) {
  return options.muon && !tensor.matrix_rows.empty() &&
         std::none_of(
             options.muon_except.begin(), options.muon_except.end(),
             [&](const std::string& pattern) { return matches_glob(pattern, tensor.name); });
}

// Before the owners of its matrices are known.
struct UnlaidGroup {
  int64_t unit = 0;
  ParameterKind kind = ParameterKind::kEqual;
  GroupTypes types;
  FlatLayoutRequest request;
};

UnlaidGroup unlaid_group(int64_t unit, const TensorGroup& group, const UnitShape& shape,
                         const PlanOptions& options) {
  const GridKind grid = row_of(group.kind).grid;
  const MeshShape mesh = options.mesh(grid);
  GroupTypes types =
      resolve_types(group.dtype, options.precision,
                    group.is_frozen ? Trainable::kNo : Trainable::kYes, group.recipe);
  if (group.has_matrices) types.second_moment = std::nullopt;
  FlatLayoutRequest request{
      .shapes = {},
      .element_bytes = narrowest_bytes(types),
      .inner_ranks = mesh.inner,
      .outer_ranks = mesh.outer,
      .granularity = group.has_matrices ? Granularity::tensor() : options.granularity};
  for (const int64_t index : group.tensors) {
    const TensorShape& tensor = shape.tensors[static_cast<size_t>(index)];
    request.shapes.push_back(owned_shape(tensor, group.kind, options.owners(grid)));
    if (group.has_matrices) request.matrix_rows.push_back(tensor.matrix_rows);
  }
  return {unit, group.kind, types, std::move(request)};
}

bool has_kind(std::span<const GroupPlan> groups, ParameterKind kind) {
  return std::any_of(groups.begin(), groups.end(),
                     [&](const GroupPlan& group) { return group.kind == kind; });
}

}  // namespace

void PlanOptions::validate() const {
  if (ranks < 1) throw UsageError(concat("ranks is ", ranks, "; it must be 1 or more"));
  if (outer < 1 || ranks % outer != 0)
    throw UsageError(concat("outer is ", outer, "; it must divide ranks = ", ranks));
  const int64_t inner = ranks / outer;
  if (tp < 1 || inner % tp != 0)
    throw UsageError(concat("tp is ", tp, " on ", ranks, " ranks = ", outer, " outer x ", inner,
                            " inner; it must divide ", inner));
  if (ep < 1 || (inner % ep != 0 && (ep % inner != 0 || ranks % ep != 0)))
    throw UsageError(concat("ep is ", ep, " on ", ranks, " ranks = ", outer, " outer x ", inner,
                            " inner; it must divide ", inner,
                            ", or be a multiple of it that divides ", ranks));
  if (host_ranks < 0 || (host_ranks > 0 && ranks > host_ranks && ranks % host_ranks != 0))
    throw UsageError(concat("host-ranks is ", host_ranks, "; it must divide ranks = ", ranks));
  check_legal(strategy);
  if (outer == 1 && shards_outer_axis(strategy))
    throw UsageError(concat("strategy is ", to_text(strategy),
                            ", which shards the outer axis, but outer is 1; set outer to 2 or "
                            "more, or drop the outer sharding"));
  if (prefetch < 0 || prefetch > kMaxPrefetch)
    throw UsageError(
        concat("prefetch is ", prefetch, "; it must be from 0 to ", kMaxPrefetch, " units"));
  if (pool_budget_bytes && pool != PoolKind::kPlanned)
    throw UsageError(concat("pool_budget is ", *pool_budget_bytes, " bytes, but the pool is ",
                            name_of(pool),
                            "; only the planned pool chooses its depth by a budget"));
  if (pool_budget_bytes && *pool_budget_bytes < 1)
    throw UsageError(concat("pool_budget is ", *pool_budget_bytes, " bytes; it must be 1 or more"));
  check_floating("compute", compute);
  check_floating("main_params", precision.main_params);
  check_floating("main_grads", precision.main_grads);
  check_floating("grad_comm", precision.grad_comm);
  check_moment("first_moment", precision.first_moment);
  check_moment("second_moment", precision.second_moment);
  if (precision.second_moment && !precision.first_moment)
    throw UsageError(concat("second_moment is ", name_of(*precision.second_moment),
                            ", but first_moment is none; AdamW has both, SGD the first or none"));
  if (weights != WeightRecipe::kPlain && precision.main_params != DType::kFloat32)
    throw UsageError(concat("weights is ", row_of(weights).name,
                            ", for which main weights are fp32, but main_params is ",
                            precision.main_params ? name_of(*precision.main_params) : "none",
                            "; set it to fp32"));
  if (row_of(weights).scale_bytes == 1 && offload > 0)
    throw UsageError(concat("weights is ", row_of(weights).name,
                            ", whose blocks must not be cut, but offload is ", offload,
                            ", which cuts shards anywhere; set it to 0"));
  if (!(offload >= 0 && offload <= 1))
    throw UsageError(concat("offload is ", offload, "; it must be a fraction from 0 to 1"));
  if (muon && offload > 0)
    throw UsageError(concat("muon updates whole matrices, but offload is ", offload,
                            ", which cuts shards anywhere; set it to 0"));
  if (muon && tp > 1)
    throw UsageError(concat("muon updates whole matrices, which tp = ", tp,
                            " ranks share out; leave tp out, or choose another optimizer"));
}

MeshShape PlanOptions::mesh(GridKind grid) const {
  const int64_t row = ranks / outer;
  switch (grid) {
    case GridKind::kDense:
      return mesh();
    case GridKind::kTensor:
      return {.outer = outer, .inner = row / tp};
    case GridKind::kExpert:
      break;
  }
  const int64_t expert_inner = row % ep == 0 ? row / ep : 1;
  return {.outer = ranks / ep / expert_inner, .inner = expert_inner};
}

int64_t PlanOptions::owners(GridKind grid) const {
  return grid == GridKind::kTensor ? tp : grid == GridKind::kExpert ? ep : 1;
}

std::vector<GroupPlan> lay_out(const ModelShape& model, const PlanOptions& options) {
  if (options.tp > 1 && !model.layers)
    throw UsageError(concat("tp is ", options.tp, ", but how the ranks of a tp group would share '",
                            shown(model.name), "' is not known; leave it out"));
  PlannedRecipes recipes(model, options);
  std::vector<UnlaidGroup> unlaid;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const UnitShape& shape = model.units[unit];
    for (const TensorGroup& group : group_tensors(
             shape, options.compute, {.ep = options.ep, .tp = options.tp},
             [&](const TensorShape& tensor) { return recipes.of(tensor); },
             [&](const TensorShape& tensor) { return is_of_muon(tensor, options); })) {
      unlaid.push_back(unlaid_group(static_cast<int64_t>(unit), group, shape, options));
      check_blocks(shape, group, unlaid.back().request.shapes);
    }
  }
  for (const GridKind grid : kGridKinds) {
    std::vector<FlatLayoutRequest*> requests;
    for (UnlaidGroup& group : unlaid)
      if (row_of(group.kind).grid == grid) requests.push_back(&group.request);
    deal_matrices(requests);
  }
  std::vector<GroupPlan> groups;
  // The load of whole tensors on each rank of a grid so far. Without it the largest tensor of every
  // unit would go to the first rank.
  std::array<std::vector<int64_t>, kGridKinds.size()> held_by_grid;
  for (UnlaidGroup& group : unlaid) {
    std::vector<int64_t>& held = held_by_grid[static_cast<size_t>(row_of(group.kind).grid)];
    const bool has_whole_tensors = group.request.granularity.kind == Granularity::Kind::kTensor &&
                                   group.request.matrix_rows.empty();
    const MeshShape mesh = options.mesh(row_of(group.kind).grid);
    if (has_whole_tensors) {
      held.resize(static_cast<size_t>(mesh.inner * mesh.outer), 0);
      group.request.held_load = held;
    }
    groups.push_back(
        {group.unit, group.kind, mesh, group.types, FlatLayout(std::move(group.request))});
    if (!has_whole_tensors) continue;
    for (const Segment& segment : groups.back().layout.segments())
      for (const Segment::UnevenShare& share : segment.uneven_shares())
        held[static_cast<size_t>(share.index)] += share.numel;
  }
  recipes.check_all_are_used();
  if (options.muon && std::none_of(groups.begin(), groups.end(),
                                   [](const GroupPlan& group) { return group.has_matrices(); }))
    throw UsageError(concat("muon has nothing to update, for model '", shown(model.name),
                            "' names no matrix of a linear layer or of experts; choose another "
                            "optimizer"));
  if (options.ep > 1 && !has_kind(groups, ParameterKind::kExpert))
    throw UsageError(concat("ep is ", options.ep, ", but model '", shown(model.name),
                            "' has no experts; leave it out, or name their tensors in "
                            "expert_parameters"));
  return groups;
}

MeshCoordinate place_of(int64_t rank, const GroupPlan& group, const PlanOptions& options) {
  const int64_t cell = rank / options.owners(row_of(group.kind).grid);
  return {.outer = cell / group.mesh.inner, .inner = cell % group.mesh.inner};
}

}  // namespace fsdp
