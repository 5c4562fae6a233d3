// fsdp::recompute(): forget what a function's forward saved, and run it again in the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Returns function(inputs). Only the inputs are kept; the backward calls the function again, with
// the random number generators as they were, and goes back through that. The function must compute
// the same both times; it may use parameters, and it may contain units or be part of one.
std::vector<at::Tensor> recompute(const TensorFunction& function,
                                  const std::vector<at::Tensor>& inputs);

// The same for one tensor to one tensor.
at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& function,
                     const at::Tensor& input);

// Where the calling thread is with regard to recompute(): what a unit does depends on it.
enum class RecomputeState : uint8_t {
  kNone,
  kFirstForward,   // without gradients, but a backward will come
  kSecondForward,  // inside a backward
  kInnerBackward,  // the backward of the second forward
};
RecomputeState recompute_state();

// In state kFirstForward: keeps something until the second forward has run, or never will.
void keep_until_recomputed(std::shared_ptr<void> something);

}  // namespace fsdp
