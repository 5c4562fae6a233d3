// What parameters of a sharded model have in grad() between two backwards: nothing to read, and
// words for whoever tries.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

// Gradients leave the parameters as soon as they are complete. An undefined grad() would say that
// there are none, and what is written for plain models (torch::optim, clip_grad_norm_()) passes
// such parameters over without a word. So grad() is a tensor that cannot be touched; and since
// zero_grad() of modules and of torch's optimizers takes it away, the engine sees that call, too.
class GradientStandIns {
 public:
  // Drops the gradient it has.
  void add(const at::Tensor& parameter, const std::string& name);

  // All at once: after a backward, and before the next, because autograd adds to what it finds.
  void put();
  void take();
  bool are_put() const { return are_put_; }

  // Which of those that were put somebody else took away; one that was replaced is some.
  enum class Missing : uint8_t { kNone, kSome, kAll };
  Missing missing() const;
  // One of them, where there is one.
  const std::string& name_of_missing() const;

 private:
  struct Entry {
    at::Tensor parameter;
    at::Tensor stand_in;
    std::string name;
    // Not grad(), which first asks at some length whether the parameter is a leaf.
    bool is_there() const { return parameter.mutable_grad().is_same(stand_in); }
  };
  std::vector<Entry> entries_;
  bool are_put_ = false;
};

}  // namespace fsdp
