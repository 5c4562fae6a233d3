#include "fsdp/plan/group_plan.h"

#include <algorithm>
#include <array>
#include <span>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/base/utf8.h"

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

// What a rank has of a tensor before it is sharded. Slices are equal: group_tensors() has checked.
std::vector<int64_t> owned_shape(const TensorShape& tensor, ParameterKind kind, int64_t owners) {
  std::vector<int64_t> shape = tensor.shape;
  if (kind == ParameterKind::kExpert) shape[0] /= owners;
  if (kind == ParameterKind::kTensor) shape[static_cast<size_t>(tensor.cut->dim)] /= owners;
  return shape;
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
  check_legal(strategy);
  if (outer == 1 && shards_outer_axis(strategy))
    throw UsageError(concat("strategy is ", to_text(strategy),
                            ", which shards the outer axis, but outer is 1; set outer to 2 or "
                            "more, or drop the outer sharding"));
  if (prefetch < 0 || prefetch > kMaxPrefetch)
    throw UsageError(
        concat("prefetch is ", prefetch, "; it must be from 0 to ", kMaxPrefetch, " units"));
  if (budget_bytes && pool != PoolKind::kPlanned)
    throw UsageError(concat("budget is ", *budget_bytes, " bytes, but the pool is ", name_of(pool),
                            "; only the planned pool chooses its depth by a budget"));
  if (budget_bytes && *budget_bytes < 1)
    throw UsageError(concat("budget is ", *budget_bytes, " bytes; it must be 1 or more"));
  check_floating("compute", compute);
  check_floating("main_params", precision.main_params);
  check_floating("main_grads", precision.main_grads);
  check_floating("grad_comm", precision.grad_comm);
  check_moment("first_moment", precision.first_moment);
  check_moment("second_moment", precision.second_moment);
  if (precision.second_moment && !precision.first_moment)
    throw UsageError(concat("second_moment is ", name_of(*precision.second_moment),
                            ", but first_moment is none; AdamW has both, SGD the first or none"));
  if (!(offload >= 0 && offload <= 1))
    throw UsageError(concat("offload is ", offload, "; it must be a fraction from 0 to 1"));
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
  if (options.tp > 1 && !model.takes_tp)
    throw UsageError(concat("tp is ", options.tp, ", but how the ranks of a tp group would share '",
                            shown(model.name), "' is not known; leave it out"));
  std::vector<GroupPlan> groups;
  const bool whole_tensors = options.granularity.kind == Granularity::Kind::kTensor;
  // What each rank of a grid holds of the groups so far. Without it the largest tensor of every
  // unit would go to the first rank.
  std::array<std::vector<int64_t>, kGridKinds.size()> held_by_grid;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const UnitShape& shape = model.units[unit];
    for (const TensorGroup& group :
         group_tensors(shape, options.compute, {.ep = options.ep, .tp = options.tp})) {
      const GridKind grid = row_of(group.kind).grid;
      const MeshShape mesh = options.mesh(grid);
      const GroupTypes types = resolve_types(group.dtype, options.precision, Trainable::kYes);
      std::vector<int64_t>& held_numel = held_by_grid[static_cast<size_t>(grid)];
      if (whole_tensors) held_numel.resize(static_cast<size_t>(mesh.inner * mesh.outer), 0);
      FlatLayoutRequest request{.shapes = {},
                                .element_bytes = narrowest_bytes(types),
                                .inner_ranks = mesh.inner,
                                .outer_ranks = mesh.outer,
                                .align_bytes = align_bytes(types),
                                .granularity = options.granularity,
                                .held_numel = held_numel};
      for (const int64_t tensor : group.tensors)
        request.shapes.push_back(owned_shape(shape.tensors[static_cast<size_t>(tensor)], group.kind,
                                             options.owners(grid)));
      groups.push_back(
          {static_cast<int64_t>(unit), group.kind, mesh, types, FlatLayout(std::move(request))});
      if (!whole_tensors) continue;
      for (const Segment& segment : groups.back().layout.segments())
        for (const Segment::UnevenShare& share : segment.uneven_shares())
          held_numel[static_cast<size_t>(share.index)] += share.numel;
    }
  }
  if (options.ep > 1 && !has_kind(groups, ParameterKind::kExpert))
    throw UsageError(concat("ep is ", options.ep, ", but model '", shown(model.name),
                            "' has no experts; leave it out, or name their tensors in "
                            "expert_parameters"));
  return groups;
}

}  // namespace fsdp
