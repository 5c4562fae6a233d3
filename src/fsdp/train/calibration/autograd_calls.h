// A layer's function as a call that can be timed: its forward, or its backward alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace fsdp::train {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Without gradients.
std::function<void()> forward_call(const TensorFunction& function,
                                   const std::vector<at::Tensor>& inputs);

// The gradients of all inputs, of a forward that ran once.
std::function<void()> backward_call(const TensorFunction& function,
                                    const std::vector<at::Tensor>& inputs);

}  // namespace fsdp::train
