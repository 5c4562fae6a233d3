// The engine as other rooms see it: an optimizer, a graph of steps, a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/comm/operation.h"
#include "fsdp/shard/engine/sharded_unit.h"
#include "fsdp/shard/options.h"

namespace fsdp {

class Engine;
class EngineMemory;
class Gradients;
class Sharded;
class Weights;

// Every view is valid as long as some Sharded of the model is.
class EngineView {
 public:
  explicit EngineView(const Sharded& sharded);

  const ShardOptions& options() const;
  const Mesh& mesh() const;
  c10::Device device() const;
  const ShardedUnits& units() const;
  // Waits until gradients are complete and updates done: everything may be read and written.
  void wait() const;

 protected:
  Engine& engine() const { return *engine_; }

 private:
  Engine* engine_;
};

// For optimizers, which read gradients and write weights and main weights.
class UpdateView : public EngineView {
 public:
  using EngineView::EngineView;

  EngineMemory& memory() const;
  // Registers an optimizer, one at a time, since each updates everything that is trainable; its
  // place is free again when the result is gone. UsageError if it is taken.
  std::shared_ptr<const std::string> register_optimizer(std::string name) const;

  // Ends the cycle for `reader`, whom errors name, and releases all weights.
  void begin_step(const char* reader) const;
  // Tells every group which of its gradients came on no rank. All ranks call it.
  void find_missing() const;
  // Units with trainable parameters, in the expected order of the next forward; first those that
  // are not scheduled.
  std::vector<ShardedUnit*> order() const;
  // Until `update` is done an optimizer reads the unit's gradients and writes its weights and main
  // weights. The unit's next gather waits for it, and so does everything else that touches them;
  // the caller does not.
  void begin(ShardedUnit& unit, Work update) const;
  void wait_updates() const;
  void cancel() const noexcept;
  // Sums numbers of the optimizer's shards, in place, over the ranks whose shards of this grid's
  // parameters differ: what ranks share along an axis counts once.
  Work sum_over_shards(const at::Tensor& tensor, GridKind grid, const Tag& tag, Work after) const;
};

// For graphs, whose replays run a step without the host's knowledge.
class RecordingView : public EngineView {
 public:
  using EngineView::EngineView;

  // Waits as wait() does, and releases all weights.
  void come_to_rest() const;
  // Makes the hooks of gradients anew, for the current stream.
  void renew_gradient_hooks() const;
  // A replay updates weights: the next gather of every unit brings the other ranks' part.
  void expect_newer_weights() const;

  // The gradients that a step leaves behind, and the memory that it runs in.
  Gradients& gradients() const;
  const Weights& weights() const;
};

// For checkpoints, exports and patches.
class StateView : public EngineView {
 public:
  using EngineView::EngineView;

  MeshShape mesh_shape() const;
  // UsageError for `what` while somebody holds whole parameters.
  void refuse_while_whole(const char* what) const;
  // UsageError that names a parameter of the unit that somebody changed whose changes are lost.
  void check_parameters(const ShardedUnit& unit) const;
  // After MainWeights::set().
  void take_over_main_weights() const;
};

}  // namespace fsdp
