// The passes of a step over a shard: the update of a span and the sum of a gradient's squares, by
// threads on the CPU and by kernels on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <variant>

#include "fsdp/base/device_stream.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/kernels/update_span.h"

namespace fsdp {

// --- updates -------------------------------------------------------------------------------------

using UpdateMath = std::variant<AdamWRule, SgdRule>;

// On the CPU, by the team's threads.
void update_on_cpu(const UpdateSpan& span, const UpdateMath& math, const StepState& state,
                   ThreadTeam& team);

// Enqueued on the device's current stream; `state` is memory of the device.
void update_on_device(const UpdateSpan& span, const UpdateMath& math, const StepState* state,
                      c10::Device device);

// One of the two, where the bytes of `state` (a StepState) are.
void update_span(const UpdateSpan& span, const UpdateMath& math, const at::Tensor& state,
                 ThreadTeam& team);

// A view of one field of a StepState, of which `state` has the bytes.
at::Tensor field_of(const at::Tensor& state, size_t offset, at::ScalarType dtype = at::kDouble);

// --- sum of squares ------------------------------------------------------------------------------

// Adds the sum of the squares of a one-dimensional tensor to `sum`, one fp64 element in the same
// memory; finite if and only if all of them are. The same gradients give the same bits, for any
// number of threads. On devices `workspace` has squared_sum_workspace_numel() elements.
void add_squared_norm(const at::Tensor& gradient, const at::Tensor& sum,
                      const at::Tensor& workspace, ThreadTeam& team);

// Adds it to `digits`, an ExactSum of int64 in the same memory: the same for any cuts of a gradient
// between blocks of kExactBlock elements.
void add_exact_squares(const at::Tensor& gradient, const at::Tensor& digits, ThreadTeam& team);
// sum = the value of those digits.
void read_exact_sum(const at::Tensor& digits, const at::Tensor& sum);

}  // namespace fsdp
