// Updates a sharded model: works on flat shards, one pass over memory per step, beside the next
// forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/rank_facts.h"
#include "fsdp/optim/kernels/step_state.h"
#include "fsdp/optim/optimizer_options.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/optim/update_state.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

class HostUpdates;
class Lane;
class ShardedUnit;

// The properties in which optimizers differ.
struct UpdateRule {
  std::string name;  // for messages: "AdamW"
  UpdateMath math;
  std::vector<MomentKind> moments;
  double learning_rate = 0.0;
  ParameterRuleOptions parameters;
};

// The options of an optimizer as facts that ranks compare, by the names of their fields. A rate
// that is set later is not among them.
RankFacts optimizer_facts(const UpdateRule& rule, const StepOptions& step);

// This rank's part of one tensor that the optimizer keeps of a parameter, by name, in the
// optimizer's placement; the list is the same on every rank and for any place of the memory. A rank
// without elements of the parameter has an entry with none.
struct OptimizerShard {
  std::string parameter;       // its first name in the module tree
  std::string name;            // "exp_avg", "exp_avg_sq", "momentum_buffer"
  std::vector<int64_t> shape;  // of the whole parameter
  int64_t begin = 0;           // elements [begin, begin + values.numel()) of the flattened whole
  at::Tensor values;           // fp32, a copy on the CPU
  // The stored type; values are exact in it, and in scaled types exact in units of the scale.
  DType kept_in = DType::kFloat32;
};

// Base of AdamW and SGD. Ranks call everything in the same order.
class Optimizer {
 public:
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer();

  // One step with the gradients of this cycle. Waits for their reductions, and with
  // Updates::kHidden for nothing else: the norm, the updates and the next forward's gathers follow
  // each other in the background.
  void step();
  // Begins a new cycle; keeps gradients that a hidden update still reads until it has read them.
  void zero_grad();

  // Applies from the next step on.
  void set_learning_rate(double rate);
  double learning_rate() const { return learning_rate_; }
  // The learning rate as one fp64 element on the model's device.
  const at::Tensor& learning_rate_on_device() const { return rate_on_device_; }

  // The loss to call backward() on, if losses are scaled.
  at::Tensor scaled(const at::Tensor& loss) const;

  // --- what the last step was; the host waits for it ---
  StepState state() const;
  // The norm of all ranks' gradients, unscaled, before clipping. Needs StepOptions::max_norm or
  // measures_norm.
  double gradient_norm() const;
  bool was_skipped() const { return state().skips != 0; }

  // Waits until all updates are done.
  void wait() const;

  // --- steps that are replayed (graph/) ---
  // Tells the device now what step() would tell it. No step may be under way.
  void tell_learning_rate();
  // Makes the caller's stream wait for the whole last step. Keeps no handle of that step, since a
  // recording must not wait for work that began outside of it.
  void wait_for_step();
  // After a failed recording: its step never ran, so nothing waits for it.
  void cancel_step() noexcept { begun_ = {}; }

  // --- checkpoints ---
  const std::string& name() const { return rule_.name; }
  // The optimizer's averages, in the order in which GroupUpdate counts them.
  const std::vector<MomentKind>& moments() const { return rule_.moments; }
  // For trainable groups, in the engine's order; call wait() before reading or setting them.
  std::vector<GroupUpdate*> group_updates();
  std::vector<OptimizerShard> shards() const;
  // Sets values for some or all of shards(), matched by parameter and name; after an Error about
  // one, none is changed.
  void set_shards(std::span<const OptimizerShard> shards);
  // Steps done and loss scale: set_state() takes these; other fields follow from them.
  void set_state(const StepState& state);

  const Sharded& sharded() const { return sharded_; }

 protected:
  Optimizer(const Sharded& sharded, UpdateRule rule, const StepOptions& options);

 private:
  struct UnitUpdate {
    ShardedUnit* unit;
    std::vector<GroupUpdate> groups;
  };

  void add_units();
  void check_gradients() const;
  Work start_norm();
  Work begin(Work norm);
  void update_unit(UnitUpdate& unit);
  void update_piece(const UpdatePiece& piece, const at::Tensor& gradient);
  StepState* state_pointer() const;
  bool needs_norm() const;
  std::vector<OptimizerShard> shards_of(const GroupUpdate& update) const;

  const Sharded sharded_;  // first: its memory must outlive the members below
  const UpdateRule rule_;
  const std::shared_ptr<const std::string> seat_;  // while it lives, this is the engine's optimizer
  const StepOptions options_;
  const StepRule step_rule_;
  double learning_rate_;
  bool rate_changed_ = true;  // since the device was last told

  at::Tensor state_;  // the bytes of a StepState, and views of some of its fields
  at::Tensor norm_;
  at::Tensor rate_on_device_;
  at::Tensor loss_scale_;
  at::Tensor workspace_;  // for the norm on a device

  std::vector<UnitUpdate> units_;  // in the engine's order
  ThreadTeam team_;                // of the lane's thread, as large as libtorch's
  std::unique_ptr<Lane> lane_;
  std::unique_ptr<HostUpdates> on_host_;  // if something is offloaded
  Work begun_;                            // the last step's beginning
};

}  // namespace fsdp
