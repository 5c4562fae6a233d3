// The Gated DeltaNet mixer with the parameters and names of Qwen3-Next, and the gated delta rule: a
// memory that forgets, and that every position corrects. In chunks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>

#include "fsdp/nn/layers/causal_conv.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/mixer.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/rms_norm.h"

namespace fsdp::nn {

// --- the rule ------------------------------------------------------------------------------------

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

// y, like value; the same for every chunk size, but for rounding. `state`, if not null, is S(-1)
// (undefined: zeros), and becomes S at the end: [batch, value_heads, key_dim, value_dim]. Keeps for
// the backward its inputs, one state per chunk and the last one, and computes the rest again.
at::Tensor gated_delta_rule(const DeltaRuleInput& input, int64_t chunk_size,
                            at::Tensor* state = nullptr);

// --- the mixer -----------------------------------------------------------------------------------

struct GatedDeltaNetOptions {
  int64_t hidden_size = 0;
  int64_t num_key_heads = 0;
  int64_t num_value_heads = 0;  // a multiple of num_key_heads; neighbours share a key head
  int64_t key_head_dim = 128;   // of queries, too
  int64_t value_head_dim = 128;
  int64_t conv_kernel = 4;
  double norm_eps = 1e-6;
  double standard_deviation = 0.02;
  int64_t chunk_size = 64;  // of the delta rule; changes time and memory, not the result
};

// Queries, keys and values pass a short convolution; the gated delta rule mixes positions; its
// result is normed per value head, gated and projected back. The ranks of a tp group have equally
// many key heads each, with all that belongs to them.
class GatedDeltaNetImpl : public Mixer, public NamedInit {
 public:
  explicit GatedDeltaNetImpl(const GatedDeltaNetOptions& options);
  at::Tensor forward(const at::Tensor& own, const LayerContext& context = {}) override;
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string&) const override { return TpShard{.dim = 0}; }

 private:
  const GatedDeltaNetOptions options_;
  at::Tensor dt_bias_, a_log_;  // [value heads]
  Projection in_proj_qkvz_, in_proj_ba_;
  CausalConv conv1d_;
  RmsNorm norm_;
  Projection out_proj_;
};
TORCH_MODULE(GatedDeltaNet);

}  // namespace fsdp::nn
