// The model's parameter groups laid out for a plan: the element counts every forecast is made of.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

// One unit's tensors of one dtype and one kind: what a rank owns of them.
struct GroupPlan {
  int64_t unit = 0;
  ParameterKind kind = ParameterKind::kEqual;
  MeshShape mesh;  // of its grid
  GroupTypes types;
  FlatLayout layout;

  // Matrices with an owner each (PlanOptions::muon).
  bool has_matrices() const { return !layout.request().matrix_rows.empty(); }
};

// In unit order. Reads ranks, types and granularity; the strategy does not change the layout.
std::vector<GroupPlan> lay_out(const ModelShape& model, const PlanOptions& options);

// A rank's place in the grid of a group; those that own its slices, which are neighbours, share
// one.
MeshCoordinate place_of(int64_t rank, const GroupPlan& group, const PlanOptions& options);

// The bytes that a rank receives when a buffer goes from one placement to another, in
// Traffic::inner and Traffic::outer. A gather widens outer then inner, a reduction narrows inner
// then outer, so that the outer axis always sees the smaller buffer.
Traffic path_traffic(PlacementPair from, PlacementPair to, int64_t bytes, MeshShape mesh);

}  // namespace fsdp
