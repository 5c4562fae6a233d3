// Causal self-attention whose keys and values are made of a short vector per token: DeepSeek's
// multi-head latent attention.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include "fsdp/nn/layers/decoding_cache.h"
#include "fsdp/nn/layers/documents.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"

namespace fsdp::nn {

struct LatentAttentionOptions {
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t query_rank = 0;  // of the vector that a token's queries are made of; 0: the token itself
  int64_t key_value_rank = 0;
  // Queries and keys have channels without positions, of each head, and channels with positions, of
  // which all heads share the keys.
  int64_t plain_size = 0;
  int64_t rotary_size = 0;
  int64_t value_size = 0;
  bool bias = false;      // of the projections to the short vectors and of o_proj
  double scale = 0.0;     // of scores
  bool is_paired = true;  // channels that turn together are neighbours; else half a head apart
  double standard_deviation = 0.02;
};

// The ranks of a tp group have equally many heads each; every rank makes the short vectors of its
// tokens.
class LatentAttentionImpl : public torch::nn::Module, public TokenParallelLayer {
 public:
  LatentAttentionImpl(const LatentAttentionOptions& options, std::shared_ptr<Rotary> rotary);
  // As of AttentionImpl. The cache holds keys and values of all heads.
  at::Tensor forward(const at::Tensor& own, LayerCache* cache,
                     const std::shared_ptr<const Documents>& documents = nullptr);
  void join(const MeshAxis& tp) override;

 private:
  at::Tensor queries_of(const at::Tensor& own);

  const LatentAttentionOptions options_;
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
TORCH_MODULE(LatentAttention);

}  // namespace fsdp::nn
