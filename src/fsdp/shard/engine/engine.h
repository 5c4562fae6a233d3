// The engine of a sharded model: its parts, and what happens between its steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/layout/lanes.h"
#include "fsdp/shard/engine/engine_memory.h"
#include "fsdp/shard/engine/gradients.h"
#include "fsdp/shard/engine/sharded_unit.h"
#include "fsdp/shard/engine/unit_call.h"
#include "fsdp/shard/engine/weights.h"
#include "fsdp/shard/options.h"

namespace fsdp {

class Sharded;

// fully_shard() makes it; the model's units and Sharded keep it alive. One thread at a time may use
// it: the one that runs forward and backward. docs/engine.md tells the life of a step.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(const Mesh& mesh, const ShardOptions& options, c10::Device device);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const ShardOptions& options() const { return options_; }
  const Mesh& mesh() const { return mesh_; }
  MeshShape mesh_shape() const { return shape_; }
  c10::Device device() const { return device_; }
  EngineMemory& memory() { return memory_; }
  const ShardedUnits& units() const { return units_; }
  Weights& weights() { return weights_; }
  Gradients& gradients() { return gradients_; }
  // Sharded's functions of these names.
  int64_t lane() const;
  int64_t micro_steps() const { return lanes_ ? lanes_->micro_steps : 0; }
  UnitCalls& calls() { return calls_; }

  // --- construction (fully_shard.cpp) ---
  ShardedUnit& add_unit(std::string name, UnitKind kind);
  const GroupSetting& setting_of(UnitKind unit, ParameterKind parameters) const;
  // After all units and groups are added: plans and allocates their temporary memory, and attaches
  // the hooks to autograd.
  void complete();
  // Makes the hooks of gradients anew. Autograd runs them on the stream that was current when they
  // were made, and a step that is recorded into a graph must run on the graph's stream alone.
  void renew_gradient_hooks();
  // For modules that call the unit: they keep the engine alive.
  std::shared_ptr<UnitHooks> hooks_of(ShardedUnit& unit) { return {shared_from_this(), &unit}; }

  // --- between steps (sharded.h says what they mean) ---
  void wait_gradients();
  // Waits until gradients are complete and updates done: everything may be read and written.
  void wait();
  void zero_grad();
  void refresh_weights();
  // After MainWeights::set(): quantised weights are made again, and the next gathers bring what
  // other ranks have set.
  void take_over_main_weights();
  // UsageError while somebody holds whole parameters, which an update would pull away.
  void refuse_while_whole(const char* what) const;
  // Ends the cycle if no backward has, for `reader`, whom errors name.
  void end_cycle(const char* reader);
  bool found_nonfinite();
  void set_grad_comm(std::optional<at::ScalarType> grad_comm);
  void reset();

  // An optimizer registers here, one at a time (engine_views.h).
  std::weak_ptr<const std::string>& optimizer() { return optimizer_; }

 private:
  std::shared_ptr<UnitCalls> shared_calls() { return {shared_from_this(), &calls_}; }

  const Mesh& mesh_;
  ShardOptions options_;
  const c10::Device device_;
  const MeshShape shape_;
  const std::optional<LaneOrder> lanes_;                // nullopt: there are none
  const std::unique_ptr<UserBufferMemory> registered_;  // if options ask for it
  EngineMemory memory_;
  WireSlots wire_slots_;
  std::vector<GroupSetting> settings_;           // of units, by ParameterKind
  std::vector<GroupSetting> resident_settings_;  // of parameters outside any unit
  ShardedUnits units_;
  Weights weights_;
  Gradients gradients_;
  UnitCalls calls_;
  std::unique_ptr<GradientHooks> gradient_hooks_;
  std::weak_ptr<const std::string> optimizer_;
};

// Gives access to the engine behind a user's handle; optim/, graph/ and checkpoint/ see the views
// of engine_views.h.
struct EngineAccess {
  static Engine& of(const Sharded& sharded);
};

}  // namespace fsdp
