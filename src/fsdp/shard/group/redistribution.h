// Changes the placement of a flat buffer on the mesh: executes the placement table by collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/comm/operation.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "fsdp/shard/options.h"

namespace fsdp {

enum class Axis : uint8_t { kInner, kOuter };

// One change of placement along one axis:
//   Shard to Replicate    all-gather
//   Partial to Shard      reduce-scatter
//   Partial to Replicate  all-reduce
struct PlacementStage {
  Axis axis = Axis::kInner;
  PlacementPair before;
  PlacementPair after;
  double scale = 1.0;  // of a reduction

  Placement from() const { return axis == Axis::kInner ? before.inner : before.outer; }
  Placement to() const { return axis == Axis::kInner ? after.inner : after.outer; }
};
using PlacementPath = std::vector<PlacementStage>;

// The stages from one placement pair to another, in the order in which they run. An axis of one
// rank has no stage, unless it talks alone. The inner axis is cut first, so reductions begin with
// it and gathers end with it.
PlacementPath placement_path(PlacementPair from, PlacementPair to, MeshShape mesh);

// The four paths of a parameter group. Weights: `refresh` in place, after an update; `unshard` into
// a slab, at every use. Gradients: `each_backward` from a slab into the main gradients, where
// microbatches add up; `cycle_end` in the main gradients, once, after the last microbatch.
struct GroupPaths {
  PlacementPath refresh;        // optimizer's placement -> parameters'
  PlacementPath unshard;        // parameters'           -> whole
  PlacementPath each_backward;  // partial               -> gradients'
  PlacementPath cycle_end;      // gradients'            -> optimizer's
  double local_scale = 1.0;     // of gradients without any stage
};

// A gradient is divided exactly once, in its first stage, whose running sum is wide; without any
// stage it is divided where it is written, or under lanes added. The divisor is the number of
// losses that a gradient is the mean over (those of a backward in the job, or of all lanes), times
// the `num_copies` of each gradient that the grid adds up (docs/engine.md, "One scale rule").
GroupPaths group_paths(const Strategy& strategy, MeshShape mesh, GradientOf gradient,
                       int64_t num_losses, int64_t num_copies = 1);

// Executes one path for the buffers of one group. The collectives run in the background, one after
// the other, without a wait of the host in between.
class Redistribution {
 public:
  // The layout and the mesh must outlive it.
  Redistribution(const FlatLayout& layout, const Grid& grid, MeshCoordinate rank,
                 PlacementPath path);

  bool communicates() const { return !stages_.empty(); }
  size_t num_stages() const { return stages_.size(); }
  // Whether the last stage stores exactly the rank's shard, so that its sum of squares is that of
  // the shard. (An all-reduce computes a share on each rank.)
  bool ends_in_shard() const {
    return communicates() && stages_.back().step.to() == Placement::kShard;
  }

  // Begins after `after` has ended. Both buffers may be the same one. Between two stages the values
  // lie in the buffer that holds more: gathers write only to the target, reductions overwrite the
  // source. `last` says how the last reduction stores, and what it looks for.
  Work start(const FlatBuffer& source, const FlatBuffer& target, const Tag& tag,
             const Work& after = {}, const Reduction& last = {});

  // In place in `buffer`, but in the type of `wire`, which is memory for a copy of the buffer and
  // free when `after` has ended. The communicators copy in both directions, because they know when
  // the memory is free.
  Work start_in_type_of(const FlatBuffer& wire, const FlatBuffer& buffer, const Tag& tag,
                        const Work& after, const Reduction& last);

 private:
  // One segment in one stage.
  struct Cut {
    FlatRange before;
    FlatRange after;
    std::vector<int64_t> counts;  // elements of every rank's share; empty when all are equal
  };
  struct Transfer {
    at::Tensor output;
    at::Tensor input;
  };
  struct Stage {
    PlacementStage step;
    Communicator* communicator;
    std::vector<Cut> cuts;            // by segment
    std::vector<Transfer> transfers;  // the same in the memory of the last start()
  };

  void look_at(const FlatBuffer& source, const FlatBuffer& target);

  std::vector<Stage> stages_;
  std::vector<at::Tensor> results_;  // in the target, if the last stage is an all-reduce
  // Pools hand out the same addresses every step, so their views need not be made again.
  at::Tensor source_;
  at::Tensor target_;
};

}  // namespace fsdp
