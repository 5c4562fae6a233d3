// Updates a sharded model: works on flat shards, one pass over memory per step, beside the next
// forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdp/optim/optimizer_options.h"
#include "fsdp/optim/span_update.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/optim/update_state.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

class HostUpdates;
class Lane;
struct UnitState;

// What distinguishes one optimizer from another.
struct UpdateRule {
  std::string name;  // for messages: "AdamW"
  UpdateMath math;
  std::vector<MomentKind> moments;
  double learning_rate = 0.0;
  ParameterRuleOptions parameters;
};

// This rank's part of what the optimizer keeps of one parameter, by name, in the optimizer's
// placement; the same on every rank and wherever the memory is. A rank that has nothing of the
// parameter has an entry with no elements.
struct OptimizerShard {
  std::string parameter;       // its first name in the module tree
  std::string name;            // "exp_avg", "exp_avg_sq", "momentum_buffer"
  std::vector<int64_t> shape;  // of the whole parameter
  int64_t begin = 0;           // elements [begin, begin + values.numel()) of the flattened whole
  at::Tensor values;           // fp32, a copy on the CPU
  // What it is kept in; values are exact in it, but for scaled types in its units.
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
  // Begins a new cycle; what a hidden update still reads stays until it is read.
  void zero_grad();

  // Applies from the next step on.
  void set_learning_rate(double rate);
  double learning_rate() const { return learning_rate_; }
  // The same as one fp64 element on the model's device.
  const at::Tensor& learning_rate_on_device() const { return rate_on_device_; }

  // The loss to call backward() on, where losses are scaled.
  at::Tensor scaled(const at::Tensor& loss) const;

  // --- what the last step was; the host waits for it ---
  StepState state() const;
  // Of the gradients of all ranks, unscaled, before clipping. Needs StepOptions::max_norm or
  // measures_norm.
  double gradient_norm() const;
  bool was_skipped() const { return state().skips != 0; }

  // Waits until all updates are done.
  void synchronize() const;

  // --- steps that are replayed (graph/) ---
  // Tells the device now what step() would tell it. Nothing of a step may be under way.
  void tell_learning_rate();
  // The caller's stream waits for all of the last step, which is then forgotten.
  void come_to_rest();
  // Without waiting: what was recorded, but cannot be replayed, never happened.
  void forget_step() { begun_ = {}; }

  // --- checkpoints ---
  const std::string& name() const { return rule_.name; }
  // The averages it keeps, in the order in which GroupUpdate counts them.
  const std::vector<MomentKind>& moments() const { return rule_.moments; }
  // Of trainable groups, in the engine's order; synchronize() before they are read or set.
  std::vector<GroupUpdate*> group_updates();
  std::vector<OptimizerShard> shards() const;
  // Values for some or all of shards(), matched by parameter and name; all or nothing: an Error
  // about one changes none.
  void set_shards(std::span<const OptimizerShard> shards);
  // Steps done and loss scale: what set_state() takes; other fields follow from them.
  void set_state(const StepState& state);

  const Sharded& sharded() const { return sharded_; }

 protected:
  Optimizer(const Sharded& sharded, UpdateRule rule, const StepOptions& options);

 private:
  struct UnitUpdate {
    UnitState* unit;
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

  const Sharded sharded_;  // first: its memory must outlive what is below
  const UpdateRule rule_;
  const std::shared_ptr<const std::string> seat_;  // the engine's optimizer is this one
  const StepOptions options_;
  const StepRule step_rule_;
  double learning_rate_;
  bool rate_changed_ = true;  // since the device was told

  at::Tensor state_;  // the bytes of a StepState, and views of some of its fields
  at::Tensor norm_;
  at::Tensor rate_on_device_;
  at::Tensor loss_scale_;
  at::Tensor workspace_;  // of the norm on a device

  std::vector<UnitUpdate> units_;  // in the engine's order
  ThreadTeam team_;                // of the lane's thread, as many as libtorch would use
  std::unique_ptr<Lane> lane_;
  std::unique_ptr<HostUpdates> on_host_;  // where something is offloaded
  Work begun_;                            // the last step's beginning
};

}  // namespace fsdp
