// What reduce_ranks() does, for tensors on a device: the same values, added in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "fsdp/comm/operation.h"

namespace fsdp {

// Enqueues, on the current stream, output = the inputs, one per rank, reduced as `reduction` says
// (one from checked_reduction). `workspace` is kept for the caller's next reduction on the same
// stream. Sums of gradient types are one kernel; other reductions are libtorch's.
void reduce_on_device(std::span<const at::Tensor> inputs, const Reduction& reduction,
                      const at::Tensor& output, at::Tensor& workspace);

// The same for inputs of type `wire` that are known by their addresses; false, and nothing is
// enqueued, when one kernel cannot do it.
bool reduce_in_one_kernel(std::span<const void* const> inputs, at::ScalarType wire,
                          const Reduction& reduction, const at::Tensor& output,
                          at::Tensor& workspace);

}  // namespace fsdp
