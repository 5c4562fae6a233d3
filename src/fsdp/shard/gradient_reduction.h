// From a group's unreduced gradients to the optimizer's: which collectives, in which order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/work.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/shard/axis_cuts.h"
#include "fsdp/shard/flat_buffer.h"
#include "fsdp/shard/reduction_path.h"

namespace fsdp {

// Runs the stages of reduction_path(). Those of each backward start in a slab of the wire type and
// end in the main gradients; a stage that is not the last one works in place in the slab. Those at
// the end of a cycle start in the main gradients, or in a copy of them in the wire type, and end in
// the main gradients again. All of them run in the background, one after the other: the first one's
// communicator makes the copy, since it knows when the memory is free.
class GradientReduction {
 public:
  GradientReduction(const AxisCuts& cuts, const Strategy& strategy, GradientOf gradient,
                    const Mesh& mesh, MeshShape shape);

  bool reduces_each_backward() const { return !each_backward_.stages.empty(); }
  bool reduces_at_cycle_end() const { return !cycle_end_.stages.empty(); }

  // What the last reduction of a path looks for in what it stores (Reduction); either may be
  // undefined.
  struct Watched {
    at::Tensor nonfinite;
    at::Tensor squares;
  };

  // slab (whole, wire type) -> main gradients, written or added as `store` says.
  Work start_each_backward(const at::Tensor& slab, const FlatBuffer& main_grad, Store store,
                           const Watched& watched, const Tag& tag);

  // `wire` is the main gradients themselves, or memory for a copy of them in the wire type, which
  // is free when `after` has ended. Copies to and fro are part of the path: nobody waits for them.
  Work start_cycle_end(const FlatBuffer& wire, const FlatBuffer& main_grad, const Watched& watched,
                       const Tag& tag, const Work& after);
  size_t num_stages_at_cycle_end() const { return cycle_end_.stages.size(); }

  // Whether the path that ends a cycle stores exactly the optimizer's part, so that the squares it
  // sees are those of the gradient norm. (An all-reduce computes a share on each rank.)
  bool ends_with_squares() const {
    const Path& last = reduces_at_cycle_end() ? cycle_end_ : each_backward_;
    return !last.stages.empty() && last.stages.back().to == Placement::kShard;
  }

 private:
  struct Step {
    at::Tensor output;
    at::Tensor input;
    std::span<const int64_t> counts;
  };
  struct Path {
    std::vector<ReductionStage> stages;
    // By stage: one step per segment, in the memory the path was last asked for. Pools hand out the
    // same addresses every step, so that the views of them need not be made again.
    std::vector<std::vector<Step>> steps;
    std::vector<Step> back;  // an all-reduce is in place: what it leaves there belongs elsewhere
    at::Tensor source;
    at::Tensor result;

    bool is_for(const at::Tensor& wanted_source, const at::Tensor& wanted_result) const {
      return source.is_same(wanted_source) && result.is_same(wanted_result);
    }
  };
  void build(Path& path, const auto& source_at, const auto& result_at) const;
  Work run(const Path& path, Reduction last_reduction, const Tag& tag) const;
  Communicator& communicator_of(const ReductionStage& stage) const;

  const AxisCuts& cuts_;
  const Mesh& mesh_;
  const Axis replicated_axis_;  // whose wholes an all-reduce covers
  Path each_backward_;
  Path cycle_end_;
};

}  // namespace fsdp
