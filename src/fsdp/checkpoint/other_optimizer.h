// The state of an optimizer of others, read and set as a group's flat buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/shard/group/param_group.h"

namespace fsdp {

// Elements [flat) of the group's buffer of one tensor, into `into`; 0 where the optimizer has none.
void read_other(const OtherOptimizer& optimizer, const ParamGroup& group, const std::string& tensor,
                FlatRange flat, const at::Tensor& into);

// The inverse; parts are made where there are none.
void set_other(OtherOptimizer& optimizer, const ParamGroup& group, const std::string& tensor,
               FlatRange flat, const at::Tensor& values);

}  // namespace fsdp
