// Learns from autograd when a parameter's gradient is complete, and offers layers a target for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>
#include <vector>

#include "fsdp/shard/engine/engine.h"

namespace fsdp {

// Attaches hooks to the gradient accumulators of all trainable parameters, and keeps both alive.
//
// A hook on the accumulator, unlike a tensor's post-accumulate hook, also runs if no gradient came
// through autograd because the layer wrote it directly. In both cases it runs once per backward,
// after all uses of the parameter.
class GradientHooks {
 public:
  explicit GradientHooks(const std::shared_ptr<Engine>& engine);

 private:
  // libtorch 2.13 counts references to nodes in another way than 2.11.
  using NodePointer =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<NodePointer> accumulators_;
};

// Whether the parameter is a trainable one of a sharded model.
bool has_gradient_hook(const at::Tensor& parameter);

}  // namespace fsdp
