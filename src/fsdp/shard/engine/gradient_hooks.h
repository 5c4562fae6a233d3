// A parameter's gradient as autograd and users see it: hooks that learn when it is complete, and
// stand-ins in grad() between two backwards.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/shard/engine/sharded_unit.h"

namespace fsdp {

// Attaches hooks to the gradient accumulators of all trainable parameters, and keeps both alive.
//
// A hook on the accumulator, unlike a tensor's post-accumulate hook, also runs if no gradient came
// through autograd because the layer wrote it directly. In both cases it runs once per backward,
// after all uses of the parameter.
class GradientHooks {
 public:
  GradientHooks(const std::shared_ptr<UnitCalls>& calls, const ShardedUnits& units);

 private:
  // libtorch 2.13 counts references to nodes in another way than 2.11.
  using NodePointer =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<NodePointer> accumulators_;
};

// Whether the parameter is a trainable one of a sharded model.
bool has_gradient_hook(const at::Tensor& parameter);

// Gradients leave the parameters as soon as they are complete. Code for plain models (torch::optim,
// clip_grad_norm_()) would silently skip parameters with an undefined grad(). So grad() is a tensor
// that cannot be touched. zero_grad() of modules and of torch's optimizers removes it, which shows
// the engine that call, too.
class GradientStandIns {
 public:
  // Drops the parameter's gradient.
  void add(const at::Tensor& parameter, const std::string& name);

  // All at once: put() after a backward, take() before the next, or autograd would add to them.
  void put();
  void take();

  // Which stand-ins others have removed; a replaced one counts as some.
  enum class Missing : uint8_t { kNone, kSome, kAll };
  Missing missing() const;
  // The name of a removed one, if there is one.
  const std::string& name_of_missing() const;

 private:
  struct StandIn {
    at::Tensor parameter;
    at::Tensor stand_in;
    std::string name;
    // Not grad(), which first checks at some cost whether the parameter is a leaf.
    bool is_there() const { return parameter.mutable_grad().is_same(stand_in); }
  };
  std::vector<StandIn> stand_ins_;
  bool are_put_ = false;
};

}  // namespace fsdp
