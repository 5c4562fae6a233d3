// Causal self-attention with grouped keys and values, or with keys and values that are made of a
// short vector per token: DeepSeek's multi-head latent attention.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/mixer.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"

namespace fsdp::nn {

struct ScoreOptions {
  // Each position sees so many, itself included, and the work grows with sequence x window; 0: all
  // before it.
  int64_t window = 0;
  std::optional<double> scale = {};  // of scores; none: 1 / sqrt(head_dim)
};

struct AttentionOptions {
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_heads; each one serves a group of query heads
  int64_t head_dim = 0;
  bool bias = false;         // of queries, keys and values
  bool output_bias = false;  // of o_proj
  ScoreOptions scores = {};
  // Norms each query and key head with this epsilon; 0: no norm.
  double qk_norm_eps = 0.0;
  NormWeight qk_norm_weight = NormWeight::kFactor;
  // q_proj has for each head a query and then a gate, whose sigmoid the head's result is multiplied
  // by.
  bool is_gated = false;
  double standard_deviation = 0.02;
  // Null: no positions.
  std::shared_ptr<Rotary> rotary = nullptr;
};

// The ranks of a tp group have equally many heads each.
class AttentionImpl : public Mixer {
 public:
  explicit AttentionImpl(const AttentionOptions& options);
  at::Tensor forward(const at::Tensor& own, const LayerContext& context) override;

 private:
  const AttentionOptions options_;
  Projection q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr}, o_proj_{nullptr};
  RmsNorm q_norm_{nullptr}, k_norm_{nullptr};
};
// --- latent attention ----------------------------------------------------------------------------

// The ranks of a tp group have equally many heads each; every rank makes the short vectors of its
// tokens.
class LatentAttentionImpl : public Mixer {
 public:
  LatentAttentionImpl(const DeepseekV3Config& config, std::shared_ptr<Rotary> rotary);
  // The cache holds keys and values of all heads.
  at::Tensor forward(const at::Tensor& own, const LayerContext& context) override;

 private:
  at::Tensor queries_of(const at::Tensor& own);

  // Queries and keys have channels without positions, of each head, and channels with positions, of
  // which all heads share the keys.
  const int64_t plain_size_, rotary_size_, value_size_;
  const int64_t key_value_rank_;
  const bool is_paired_;  // channels that turn together are neighbours; else half a head apart
  const double scale_;    // of scores
  const std::shared_ptr<Rotary> rotary_;
  Projection q_proj_{nullptr};  // or the three below
  Projection q_a_proj_{nullptr};
  RmsNorm q_a_layernorm_{nullptr};
  Projection q_b_proj_{nullptr};
  Projection kv_a_proj_{nullptr};
  RmsNorm kv_a_layernorm_{nullptr};
  Projection kv_b_proj_{nullptr};
  Projection o_proj_{nullptr};
};
}  // namespace fsdp::nn
