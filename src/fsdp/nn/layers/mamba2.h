// The Mamba-2 mixer with the parameters and names of Nemotron-H, and its state space.
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/layers/causal_conv.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/mixer.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/rms_norm.h"

namespace fsdp::nn {

// --- the state space -----------------------------------------------------------------------------

// A recurrence over positions, computed in chunks. All fp32. For every batch entry and head h of
// group g, with a state S [head_dim, state]:
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

// y, [batch, sequence, heads, head_dim]; the same for every chunk size, but for rounding. `state`,
// if not null, is S(-1) (undefined: zeros), and becomes S at the end: [batch, groups, heads of a
// group, head_dim, state].
at::Tensor selective_scan(const ScanInput& input, int64_t chunk_size, at::Tensor* state = nullptr);

// --- the mixer -----------------------------------------------------------------------------------

// The ranks of a tp group have equally many groups each, with their heads: the norm of a group sees
// all of its channels.
class Mamba2Impl : public Mixer, public NamedInit {
 public:
  explicit Mamba2Impl(const NemotronHConfig& config);
  at::Tensor forward(const at::Tensor& own, const LayerContext& context) override;
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string&) const override { return TpShard{.dim = 0}; }

 private:
  const NemotronHConfig config_;
  at::Tensor a_log_, d_, dt_bias_;  // [heads]
  Projection in_proj_;
  CausalConv conv1d_;
  RmsNorm norm_;
  Projection out_proj_;
};
}  // namespace fsdp::nn
