// Parameters that got no gradient in a cycle, on any rank: a head that nothing used, a layer that
// was frozen after fully_shard().
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/work.h"
#include "fsdp/shard/engine/sharded_unit.h"

namespace fsdp {

// A missing gradient is zero in the main gradients, since other ranks may have one. Where no rank
// has, optimizers leave the parameter alone, as those of torch do.
class MissingGradients {
 public:
  MissingGradients(const Mesh& mesh, const ShardedUnits& units, c10::Device device)
      : mesh_(mesh), units_(units), device_(device) {}

  // After the end of a cycle: tells every group which of its gradients are missing
  // (GroupGradient::is_missing). All ranks call it.
  void find();

  // A step that is being recorded cannot wait for other ranks; it takes what the last eager step
  // learned.
  void set_recording(bool is_recording) { is_recording_ = is_recording; }

 private:
  // The trainable members of one grid, in order.
  struct OfGrid {
    std::vector<float> came;    // 1 where a gradient came on this rank, else 0
    std::vector<bool> missing;  // empty: none
    at::Tensor num_ranks;       // with a gradient
    Work telling;
  };
  void find(GridKind kind);
  std::vector<bool> ask_others(OfGrid& of, const Grid& grid, bool all_came) const;

  const Mesh& mesh_;
  const ShardedUnits& units_;
  const c10::Device device_;
  std::array<OfGrid, kGridKinds.size()> grids_;
  bool is_recording_ = false;
};

}  // namespace fsdp
