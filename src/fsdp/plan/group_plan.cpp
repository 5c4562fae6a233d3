#include "fsdp/plan/group_plan.h"

#include <algorithm>
#include <array>

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

// What a rank has of a tensor before it is sharded.
std::vector<int64_t> owned_shape(const TensorShape& tensor, const TensorGroup& group, int64_t ep) {
  std::vector<int64_t> shape = tensor.shape;
  if (!group.is_expert) return shape;
  if (tensor.num_experts % ep != 0)
    throw UsageError(concat("ep is ", ep, ", but '", tensor.name, "' has ", tensor.num_experts,
                            " experts; ep must divide their number"));
  shape[0] /= ep;
  return shape;
}

}  // namespace

void PlanOptions::validate() const {
  if (ranks < 1) throw UsageError(concat("ranks is ", ranks, "; it must be 1 or more"));
  if (outer < 1 || ranks % outer != 0)
    throw UsageError(concat("outer is ", outer, "; it must divide ranks = ", ranks));
  const int64_t inner = ranks / outer;
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

MeshShape PlanOptions::expert_mesh() const {
  const int64_t inner = ranks / outer;
  const int64_t expert_inner = inner % ep == 0 ? inner / ep : 1;
  return {.outer = ranks / ep / expert_inner, .inner = expert_inner};
}

std::vector<GroupPlan> lay_out(const ModelShape& model, const PlanOptions& options) {
  std::vector<GroupPlan> groups;
  const bool whole_tensors = options.granularity.kind == Granularity::Kind::kTensor;
  // What each rank of a grid holds of the groups so far. Without it the largest tensor of every
  // unit would go to the first rank.
  std::array<std::vector<int64_t>, 2> held_by_grid;
  const ExpertGroups experts = options.ep > 1 ? ExpertGroups::kApart : ExpertGroups::kTogether;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const UnitShape& shape = model.units[unit];
    for (const TensorGroup& group : group_tensors(shape, options.compute, experts)) {
      const MeshShape mesh = group.is_expert ? options.expert_mesh() : options.mesh();
      const GroupTypes types = resolve_types(group.dtype, options.precision, Trainable::kYes);
      std::vector<int64_t>& held_numel = held_by_grid[group.is_expert ? 1 : 0];
      if (whole_tensors) held_numel.resize(static_cast<size_t>(mesh.inner * mesh.outer), 0);
      FlatLayoutRequest request{.shapes = {},
                                .element_bytes = narrowest_bytes(types),
                                .inner_ranks = mesh.inner,
                                .outer_ranks = mesh.outer,
                                .granularity = options.granularity,
                                .held_numel = held_numel};
      for (const int64_t tensor : group.tensors)
        request.shapes.push_back(
            owned_shape(shape.tensors[static_cast<size_t>(tensor)], group, options.ep));
      groups.push_back({static_cast<int64_t>(unit), group.is_expert, mesh, types,
                        FlatLayout(std::move(request))});
      if (!whole_tensors) continue;
      for (const Segment& segment : groups.back().layout.segments())
        for (const Segment::UnevenShare& share : segment.uneven_shares())
          held_numel[static_cast<size_t>(share.index)] += share.numel;
    }
  }
  const auto is_expert = [](const GroupPlan& group) { return group.is_expert; };
  if (options.ep > 1 && std::none_of(groups.begin(), groups.end(), is_expert))
    throw UsageError(concat("ep is ", options.ep, ", but model '", shown(model.name),
                            "' has no experts; leave it out"));
  return groups;
}

}  // namespace fsdp
