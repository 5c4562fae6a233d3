// Results over all ranks of a sharded model, whichever grid has its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "fsdp/python/resources.h"

namespace fsdp {

// All of a parameter, given what this rank has of it while its unit is whole: `own` itself, or the
// slices of all ranks of its ep or tp group, joined. All ranks call it.
at::Tensor join_slices(ShardedModel& model, const std::string& parameter, const at::Tensor& own);

// The sum of the squares of all gradients, every element once; one fp64 element. All ranks call it.
at::Tensor squared_gradient_norm(ShardedModel& model);

}  // namespace fsdp
