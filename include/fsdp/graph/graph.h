// A training step that is recorded once and then replayed: thousands of launches become one.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fsdp/shard/sharded.h"

namespace fsdp {

class Optimizer;

struct GraphOptions {
  // Steps that run as they are before one is recorded: the first ones learn the order of units,
  // plan the pool and let libraries choose their algorithms.
  int32_t warmup = 3;

  // Random number generators that the step uses besides the device's default one.
  std::vector<at::Generator> generators = {};

  // UsageError naming the field, its value and the fix.
  void validate() const;
};

// Runs `body`, one step of training, again and again: a whole step (microbatches, backward,
// optimizer.step(), zero_grad()) or forward and backward alone. docs/gpu.md shows both.
//
// The body reads its input from tensors that stay: copy a batch into them before run(). What it
// assigns to tensors outside (the loss) is there after every run. It must not wait for the device
// (item(), a copy to the host) and must do the same in every step; what changes from step to step
// must be on the device. Learning rates are: set them outside the body.
//
// A replay is bitwise what the body would have computed. Between runs anything may happen: a
// validation, a checkpoint, a step without the graph. What plans the model's memory anew (passes in
// another order of units, set_precision()) makes the next runs eager ones, until the step is
// recorded again.
class Graph {
 public:
  using Body = std::function<void()>;

  // `optimizer` is the one whose step() the body calls; nullptr if it calls none. A UsageError
  // where the options of the sharded model do not allow a recording.
  Graph(const Sharded& sharded, Optimizer* optimizer, Body body, const GraphOptions& options = {});
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // One step: eager at first, then recorded and replayed, then replayed. Returns when the step is
  // queued; the caller's current stream waits for it. If the body cannot be recorded: an Error, and
  // the model is as before the step.
  void run();

  bool is_recorded() const;

 private:
  class Impl;

  const std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
