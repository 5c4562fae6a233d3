// Mamba-2's state space: a recurrence over positions, computed in chunks.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::nn {

// All fp32. For every batch entry and head h of group g, with a state S [head_dim, state]:
//   S(t) = exp(step(t) A) S(t - 1) + step(t) x(t) B(t)^T        S(-1) = 0
//   y(t) = S(t) C(t) + D x(t)
struct ScanInput {
  at::Tensor x;     // [batch, sequence, heads, head_dim]
  at::Tensor step;  // [batch, sequence, heads], not negative
  at::Tensor a;     // [heads], negative
  at::Tensor b;     // [batch, sequence, groups, state]; each group is for heads / groups heads
  at::Tensor c;     // the same
  at::Tensor d;     // [heads]
};

// y, [batch, sequence, heads, head_dim]. Within a chunk positions see each other by matrix
// products; between chunks the state is handed on. The result does not depend on the chunk's size
// but for rounding, and the sequence need not be a multiple of it. `state`, where it is not null,
// is S(-1), zeros if undefined, and becomes S at the end: [batch, groups, heads of a group,
// head_dim, state].
at::Tensor selective_scan(const ScanInput& input, int64_t chunk_size, at::Tensor* state = nullptr);

}  // namespace fsdp::nn
