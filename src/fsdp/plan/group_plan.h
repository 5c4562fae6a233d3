// The model's parameter groups laid out for a plan: the element counts every forecast is made of.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/comm/collective_cost.h"
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

// One group's unsharded buffers, in bytes.
struct GroupBytes {
  int64_t weight = 0;
  int64_t wire = 0;    // in the type gradients travel in; 0 for a group without gradients
  int64_t amaxes = 0;  // of quantised weights, which ranks combine after an update
};
GroupBytes group_bytes(const GroupPlan& group);

// A collective of a group along an axis of its grid; `bytes` when the buffer is whole there.
enum class GridAxis : uint8_t { kInner, kOuter, kOwners };
struct GroupMove {
  GridAxis axis;
  Collective collective;
  int64_t bytes;
  bool is_of_amaxes = false;
};

// From one placement to another. A gather widens outer then inner, a reduction narrows inner then
// outer, so that the outer axis always sees the smaller buffer.
std::vector<GroupMove> path_moves(PlacementPair from, PlacementPair to, int64_t bytes,
                                  MeshShape mesh);

// The step of one microbatch, from placements alone:
//   weights    sharded between uses: gathered before each use (`num_gathers` times). Where the
//              optimizer is sharded and the weights are not: gathered once, after the update;
//   gradients  first brought from Partial to their own placement, then to the optimizer's.
std::vector<GroupMove> group_moves(const Strategy& strategy, MeshShape mesh, GroupBytes bytes,
                                   int64_t num_gathers);

// The bytes that a rank receives, in Traffic::inner and Traffic::outer.
Traffic traffic_of(const std::vector<GroupMove>& moves, MeshShape mesh);

// The cost of a step of one microbatch to the network of a cluster. Weights are gathered
// `num_gathers` times in it, by unit; what layers exchange over ep and tp is not counted.
NetworkForecast forecast_network(std::span<const GroupPlan> groups, const PlanOptions& options,
                                 std::span<const int64_t> num_gathers);

}  // namespace fsdp
