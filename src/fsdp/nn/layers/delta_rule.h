// The gated delta rule: a memory that forgets, and that every position corrects. In chunks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::nn {

// All of one type, fp32 or fp64. For every batch entry and value head, with a state S [key_dim,
// value_dim] that answers a key k with S^T k:
//   S'(t) = exp(log_decay(t)) S(t - 1)                                     S(-1) = 0
//   S(t) = S'(t) + k(t) delta(t)^T,    delta(t) = beta(t) (v(t) - S'(t)^T k(t))
//   y(t) = S(t)^T q(t)
// With beta = 1 and a key of length 1, S(t) answers k(t) with exactly v(t).
struct DeltaRuleInput {
  at::Tensor query;      // [batch, sequence, key_heads, key_dim]
  at::Tensor key;        // the same, no longer than 1
  at::Tensor value;      // [batch, sequence, value_heads, value_dim]; value_heads / key_heads
                         // neighbours share a key head
  at::Tensor log_decay;  // [batch, sequence, value_heads], not positive
  at::Tensor beta;       // the same, from 0 to 1
};

// y, like value. Except for rounding, the result does not depend on the chunk size, of which the
// sequence need not be a multiple. `state`, if not null, is S(-1) (undefined: zeros), and becomes S
// at the end: [batch, value_heads, key_dim, value_dim].
//
// Keeps for the backward its inputs, one state per chunk and the last one, and computes the rest
// again: per position 2 key_heads key_dim + value_heads (value_dim + 2 + key_dim value_dim /
// chunk_size) numbers.
at::Tensor gated_delta_rule(const DeltaRuleInput& input, int64_t chunk_size,
                            at::Tensor* state = nullptr);

}  // namespace fsdp::nn
