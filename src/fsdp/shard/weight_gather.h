// From a group's sharded weights to whole ones: which all-gathers, in which order.
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

namespace fsdp {

// Two paths, each Shard to Replicate along the axes where it is needed, outer before inner:
//   refresh   from the optimizer's placement to the parameters', in place in the weight buffer;
//             once after every update (ZeRO-1, ZeRO-2, HFSDP; nothing for ZeRO-3 and HSDP)
//   unshard   from the parameters' placement to whole weights in a slab; at every use (ZeRO-3)
//
// Collectives run in the background, one after the other, without the host waiting in between.
class WeightGather {
 public:
  WeightGather(const FlatLayout& layout, const AxisCuts& cuts, const Strategy& strategy,
               const Mesh& mesh, MeshShape shape, const FlatBuffer& weight);

  bool refresh_communicates() const { return refreshes_; }
  bool unshard_communicates() const { return unshards_; }

  // Starts both paths where asked for, after `after` has written the weights; `slab` is where the
  // whole weights go, or nullptr when the weight buffer itself is whole. The result is there when
  // the returned work is done.
  enum class Refresh : uint8_t { kNo, kYes };
  Work start(void* slab, Refresh refresh, const Tag& tag, Work after);

 private:
  struct Step {
    Communicator* communicator = nullptr;
    at::Tensor output;
    at::Tensor input;
    std::span<const int64_t> counts;
  };
  using Stage = std::vector<Step>;  // one step per segment, all along one axis

  void build_refresh();
  void build_unshard(void* slab);
  bool gathers(PlacementPair from, PlacementPair to, Axis axis) const;
  Stage stage_of(Axis axis, const auto& output_at, const auto& input_at) const;
  static Work run(const std::vector<Stage>& stages, const Tag& tag, Work after);

  const FlatLayout& layout_;
  const AxisCuts& cuts_;
  const Mesh& mesh_;
  const MeshShape shape_;
  const FlatBuffer& weight_;
  const PlacementPair parameter_;
  const PlacementPair optimizer_;
  bool refreshes_ = false;
  bool unshards_ = false;
  std::vector<Stage> refresh_;  // made at its first use
  // For the slab it was last asked for: pools hand out the same addresses every step.
  std::vector<Stage> unshard_;
  void* unshard_slab_ = nullptr;
};

}  // namespace fsdp
