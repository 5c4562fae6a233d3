#include "fsdp/plan/group_plan.h"

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

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

}  // namespace

void PlanOptions::validate() const {
  if (ranks < 1) throw UsageError(concat("ranks is ", ranks, "; it must be 1 or more"));
  if (outer < 1 || ranks % outer != 0)
    throw UsageError(concat("outer is ", outer, "; it must divide ranks = ", ranks));
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

std::vector<GroupPlan> lay_out(const ModelShape& model, const PlanOptions& options) {
  const MeshShape mesh = options.mesh();
  std::vector<GroupPlan> groups;
  const bool whole_tensors = options.granularity.kind == Granularity::Kind::kTensor;
  // What each rank holds of the groups so far. Without it the largest tensor of every unit would
  // go to the first rank.
  std::vector<int64_t> held_numel(
      whole_tensors ? static_cast<size_t>(mesh.inner * mesh.outer) : size_t{0}, 0);
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const UnitShape& shape = model.units[unit];
    for (const DTypeGroup& group : group_by_dtype(shape, options.compute)) {
      const GroupTypes types = resolve_types(group.dtype, options.precision, Trainable::kYes);
      FlatLayoutRequest request{.shapes = {},
                                .element_bytes = narrowest_bytes(types),
                                .inner_ranks = mesh.inner,
                                .outer_ranks = mesh.outer,
                                .granularity = options.granularity,
                                .held_numel = held_numel};
      for (const int64_t tensor : group.tensors)
        request.shapes.push_back(shape.tensors[static_cast<size_t>(tensor)].shape);
      groups.push_back({static_cast<int64_t>(unit), types, FlatLayout(std::move(request))});
      if (!whole_tensors) continue;
      for (const Segment& segment : groups.back().layout.segments())
        for (const Segment::UnevenShare& share : segment.uneven_shares())
          held_numel[static_cast<size_t>(share.index)] += share.numel;
    }
  }
  return groups;
}

}  // namespace fsdp
