// Updates a sharded model: works on flat shards, one pass over memory per step, beside the next
// forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/optim/optimizer_options.h"
#include "fsdp/optim/step_state.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

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

// Numbers of averages that may change between steps; nullopt: as it was.
struct Momenta {
  std::optional<double> beta1 = std::nullopt;  // AdamW, and Muon of what it leaves to it
  std::optional<double> beta2 = std::nullopt;
  std::optional<double> momentum = std::nullopt;  // SGD, Muon
};

// Base of AdamW and SGD. Ranks call everything in the same order.
class Optimizer {
 public:
  class Impl;

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
  double learning_rate() const;
  // The learning rate as one fp64 element on the model's device.
  const at::Tensor& learning_rate_on_device() const;

  // Changes what the rule of this index in the options says, from the next step on. Waits for
  // updates under way, and a recorded step is recorded again: for rare changes, unlike the learning
  // rate.
  void set_rule(size_t index, double weight_decay, double rate_scale);

  // Changes the numbers of averages, for schedules that do; waits and records again as set_rule().
  void set_momenta(const Momenta& momenta);

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
  [[deprecated("its name is wait()")]] void synchronize() const { wait(); }

  // --- checkpoints ---
  const std::string& name() const;
  std::vector<OptimizerShard> shards() const;
  // Sets values for some or all of shards(), matched by parameter and name; after an Error about
  // one, none is changed.
  void set_shards(std::span<const OptimizerShard> shards);
  // Steps done and loss scale: set_state() takes these; other fields follow from them.
  void set_state(const StepState& state);

  const Sharded& sharded() const;

 protected:
  explicit Optimizer(std::unique_ptr<Impl> impl);

 private:
  friend struct OptimizerAccess;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
