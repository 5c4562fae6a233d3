// The engine of a sharded model: calls of units, the backward that follows, updates in between.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/shard/direct_gradient.h"
#include "fsdp/shard/engine/engine_memory.h"
#include "fsdp/shard/engine/gradients.h"
#include "fsdp/shard/engine/missing_gradients.h"
#include "fsdp/shard/engine/sharded_unit.h"
#include "fsdp/shard/engine/user_buffer_memory.h"
#include "fsdp/shard/engine/weights.h"
#include "fsdp/shard/options.h"

namespace fsdp {

class GradientHooks;
class Sharded;
class UnitCall;
class UnitHooks;

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
  const SlabSource& slabs() const { return slabs_; }
  const ShardedUnits& units() const { return units_; }
  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }
  Gradients& gradients() { return gradients_; }
  const Gradients& gradients() const { return gradients_; }
  MissingGradients& missing_gradients() { return missing_gradients_; }

  // --- construction (fully_shard.cpp) ---
  ShardedUnit& add_unit(std::string name, UnitKind kind);
  const GroupSetting& setting_of(UnitKind unit, ParameterKind parameters) const;
  // Keeps the hooks of a unit that is not declared as Unit<M>.
  void own_hooks(std::unique_ptr<UnitHooks> hooks);
  // After all units and groups are added: plans and allocates their temporary memory, and attaches
  // the hooks to autograd.
  void complete();

  // --- around a unit's forward and backward (unit_call.cpp) ---
  CallMode begin_call(ShardedUnit& unit);
  // Counts a call whose backward may come, until it has come or cannot come any more. Returns a
  // count that uncount_call() takes; counts from before a reset() are ignored.
  int64_t count_call(ShardedUnit& unit);
  void uncount_call(ShardedUnit& unit, int64_t generation);
  int32_t num_pending_calls(const ShardedUnit& unit) const {
    return calls_[static_cast<size_t>(unit.index())].num_pending;
  }
  int64_t next_call_number() { return next_call_number_++; }

  // Called when a backward reaches one of our hooks.
  void enter_backward();
  bool is_in_backward() const { return in_backward_; }
  int64_t backward_number() const { return backward_number_; }
  // Throws an Error if the running backward builds a graph itself.
  static void refuse_second_order();
  // Begins the backward of one more call; a repeated one is not the first through its graph.
  void begin_call_backward(std::shared_ptr<UnitCall> call, ShardedUnit& unit, bool is_repeated);
  // Ends newer calls that have no hook of their own for it (unit_call.h).
  void end_calls_after(int64_t number);
  // Ends the backward of one call; the end of the unit's last call starts its reduction.
  void call_is_through(ShardedUnit& unit);

  // --- gradients (gradient_hook.cpp) ---
  void gradient_ready(ShardedUnit& unit, ParamGroup& group, int64_t member,
                      const at::Tensor& gradient);
  Gradients::DirectTarget direct_target(ShardedUnit& unit, ParamGroup& group, int64_t member,
                                        GradientType type);
  // Makes the hooks anew. Autograd runs them on the stream that was current when they were made,
  // and a step that is recorded into a graph must run on the graph's stream alone.
  void renew_gradient_hooks();

  // --- updates (optim/) ---
  // Registers an optimizer, one at a time, since each updates everything that is trainable; its
  // place is free again when the result is gone. UsageError if it is taken.
  std::shared_ptr<const std::string> seat_optimizer(std::string name);
  // Units with trainable parameters, in the expected order of the next forward; first those that
  // are not scheduled.
  std::vector<ShardedUnit*> update_order() const;
  // Until `update` is done an optimizer reads the unit's gradients and writes its weights and main
  // weights. The unit's next gather waits for it, and so does everything else that touches them;
  // the caller does not.
  void begin_update(ShardedUnit& unit, Work update);
  void wait_updates();
  void cancel_updates() noexcept;
  // Sums numbers of the optimizer's shards, in place, over the ranks whose shards of this grid's
  // parameters differ: what ranks share along an axis counts once.
  Work sum_over_shards(const at::Tensor& tensor, GridKind grid, const Tag& tag, Work after) const;
  // A replayed step updates weights without the host's knowledge: the next gather of every unit
  // brings the other ranks' part.
  void expect_newer_weights();

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

 private:
  // Calls of one unit.
  struct Calls {
    int32_t num_pending = 0;   // their backward may still come (unit_call.h)
    bool is_repeated = false;  // the running backward is not the first one through its graph
  };

  Calls& calls_of(const ShardedUnit& unit) { return calls_[static_cast<size_t>(unit.index())]; }
  void reduce_if_through(ShardedUnit& unit);
  void end_backward();
  void close_backward();

  const Mesh& mesh_;
  ShardOptions options_;
  const c10::Device device_;
  const MeshShape shape_;
  const std::unique_ptr<UserBufferMemory> registered_;  // if options ask for it
  EngineMemory memory_;
  WireSlots wire_slots_;
  SlabSource slabs_;
  std::vector<GroupSetting> settings_;           // of units, by ParameterKind
  std::vector<GroupSetting> resident_settings_;  // of parameters outside any unit
  ShardedUnits units_;
  Weights weights_;
  Gradients gradients_;
  MissingGradients missing_gradients_;
  std::unique_ptr<GradientHooks> gradient_hooks_;
  std::vector<std::unique_ptr<UnitHooks>> named_hooks_;

  std::vector<Calls> calls_;                           // by index of the unit
  std::vector<std::shared_ptr<UnitCall>> open_calls_;  // of the running backward
  int64_t next_call_number_ = 0;
  int64_t generation_ = 0;
  bool in_backward_ = false;
  bool end_is_queued_ = false;
  int64_t backward_number_ = 0;
  std::weak_ptr<const std::string> optimizer_;
};

// Gives the rooms above access to the engine behind a user's handle.
struct EngineAccess {
  static Engine& of(const Sharded& sharded);
};

}  // namespace fsdp
