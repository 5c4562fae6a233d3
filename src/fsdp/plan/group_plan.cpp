#include "fsdp/plan/group_plan.h"

namespace fsdp {

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
