// Stand-ins in grad() of a sharded model's parameters between two backwards: they hold nothing, and
// throw a sentence when they are read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

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
  bool are_put() const { return are_put_; }

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
