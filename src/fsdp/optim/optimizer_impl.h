// The inside of an optimizer: its state by units and groups, and the course of a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/operation.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/matrix_updates.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/optim/parameter_rules.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/optim/update_state.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp {

class HostUpdates;
class TaskQueue;

// The properties in which optimizers differ.
struct UpdateRule {
  std::string name;  // for messages: "AdamW"
  UpdateMath math;
  std::vector<MomentKind> moments;
  double learning_rate = 0.0;
  ParameterRuleOptions parameters;
  RankFacts facts;  // the optimizer's options, which ranks compare
  std::optional<MatrixRule> matrices = std::nullopt;  // of groups of matrices: instead of the above
};

// UsageError that names the option, for a type that moments cannot have.
DType moment_dtype(const char* field, at::ScalarType type);

// Functions without a comment here are those of Optimizer.
class Optimizer::Impl {
 public:
  Impl(const Sharded& sharded, UpdateRule rule, const StepOptions& options);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  void step();
  void set_learning_rate(double rate);
  double learning_rate() const { return learning_rate_; }
  const at::Tensor& learning_rate_on_device() const { return rate_on_device_; }
  void set_rule(size_t index, double weight_decay, double rate_scale);
  void set_momenta(const Momenta& momenta);
  at::Tensor scaled(const at::Tensor& loss) const;
  StepState state() const;
  double gradient_norm() const;
  void wait() const;

  // --- steps that are replayed (graph/) ---
  // How often set_rule() was called: the numbers of rules are part of a recording.
  int64_t num_rule_changes() const { return num_rule_changes_; }
  // Tells the device now what step() would tell it. No step may be under way.
  void tell_learning_rate();
  // Makes the caller's stream wait for the whole last step. Keeps no handle of that step, since a
  // recording must not wait for work that began outside of it.
  void wait_for_step();
  // After a failed recording: its step never ran, so nothing waits for it.
  void cancel_step() noexcept { begun_ = {}; }

  // --- checkpoints ---
  const std::string& name() const { return rule_.name; }
  // The names of all averages that it keeps of some parameter.
  std::vector<std::string> moment_names() const;
  // For trainable groups, in the engine's order; call wait() before reading or setting them.
  std::vector<GroupUpdate*> group_updates();
  bool marks_changes() const { return options_.marks_changes; }
  // Counts who takes the marks: whoever comes next sees whether others have since.
  int64_t take_marks() { return ++num_mark_takes_; }
  int64_t num_mark_takes() const { return num_mark_takes_; }
  std::vector<OptimizerShard> shards() const;
  void set_shards(std::span<const OptimizerShard> shards);
  void set_state(const StepState& state);
  // Parameters with fewer updates than the optimizer, and how many they had.
  std::map<std::string, int64_t> late_updates();
  void set_late_updates(const std::map<std::string, int64_t>& updates);

  const Sharded& sharded() const { return sharded_; }

 private:
  struct UnitUpdate {
    ShardedUnit* unit;
    std::vector<GroupUpdate> groups;
  };

  void add_units();
  void leave_out_missing();
  // The squared norm of all gradients; of those of one grid, every element once.
  Work start_norm();
  Work start_norm(GridKind grid, const at::Tensor& norm);
  Work start_exact_norm(GridKind grid, const at::Tensor& norm);
  Work begin(Work norm);
  // An update under way. Quantised weights are made of it when the ranks have combined their
  // amaxes.
  struct StartedUpdate {
    UnitUpdate* unit;
    Work updated;
    std::vector<QuantizedWeights*> quantized = {};
    std::vector<Work> combined = {};
  };
  Work update_unit(UnitUpdate& unit);
  StartedUpdate start_update(UnitUpdate& unit, Work updated);
  void end_update(StartedUpdate started);
  // Factor of the learning rate of everything that Muon leaves to AdamW; else 1.
  double rate_scale_beside_matrices() const {
    return rule_.matrices ? rule_.matrices->adamw_rate_scale : 1.0;
  }
  bool is_of_matrices(const GroupUpdate& update) const {
    return matrices_.has_value() && update.group().has_matrices();
  }
  void update_piece(const GroupUpdate& update, const UpdatePiece& piece);
  bool needs_norm() const;
  std::vector<OptimizerShard> shards_of(const GroupUpdate& update) const;

  const Sharded sharded_;  // first: its memory must outlive the members below
  const UpdateView engine_;
  UpdateRule rule_;
  const std::shared_ptr<const std::string>
      registration_;  // while it lives, this is the engine's optimizer
  const StepOptions options_;
  StepRule step_rule_;
  double learning_rate_;
  bool rate_changed_ = true;  // since the device was last told
  int64_t num_rule_changes_ = 0;
  int64_t num_mark_takes_ = 0;

  at::Tensor state_;  // the bytes of a StepState, and views of some of its fields
  at::Tensor norm_;
  std::array<at::Tensor, kGridKinds.size()> grid_digits_;  // ExactSum of each, under lanes
  std::vector<at::Tensor> grid_norms_;  // by Mesh::grids(): the first one is norm_, their sum
  at::Tensor rate_on_device_;
  at::Tensor loss_scale_;
  at::Tensor workspace_;  // for the norm on a device

  std::vector<UnitUpdate> units_;  // in the engine's order
  ThreadTeam team_;                // of the queue's thread, as large as libtorch's
  std::optional<MatrixUpdates> matrices_;
  std::unique_ptr<TaskQueue> updates_queue_;
  std::unique_ptr<HostUpdates> on_host_;  // if something is offloaded
  Work begun_;                            // the last step's beginning
};

// How other rooms reach the inside of an optimizer that a user holds.
struct OptimizerAccess {
  static Optimizer::Impl& of(const Optimizer& optimizer) { return *optimizer.impl_; }
};

}  // namespace fsdp
