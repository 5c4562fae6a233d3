// The squared norm of gradients, wherever they are.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/optim/thread_team.h"

namespace fsdp {

// Adds the sum of the squares of a one-dimensional tensor to `sum`, one fp64 element in the same
// memory; not finite if and only if one of them is not. The same bits for the same gradients,
// however many threads there are. On devices `workspace` has squared_sum_workspace_numel()
// elements.
void add_squared_norm(const at::Tensor& gradient, const at::Tensor& sum,
                      const at::Tensor& workspace, ThreadTeam& team);

}  // namespace fsdp
