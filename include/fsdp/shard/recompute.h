// fsdp::recompute(): keeps nothing of a function's forward, and runs it again in the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Returns function(inputs) and keeps only the inputs. The backward restores the random number
// generators, calls the function again and goes back through that call. The function must compute
// the same both times; it may use parameters, contain units, or be part of one.
std::vector<at::Tensor> recompute(const TensorFunction& function,
                                  const std::vector<at::Tensor>& inputs);

// For functions of one tensor that return one.
at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& function,
                     const at::Tensor& input);

// The calling thread's place in recompute(), on which a unit's behaviour depends.
enum class RecomputeState : uint8_t {
  kNone,
  kFirstForward,   // without gradients, but a backward will come
  kSecondForward,  // inside a backward
  kInnerBackward,  // the backward of the second forward
};
RecomputeState recompute_state();

// In state kFirstForward: keeps `something` until the second forward has run, or never will.
void keep_until_recomputed(std::shared_ptr<void> something);

}  // namespace fsdp
