// Causal self-attention with grouped keys and values.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "fsdp/nn/layers/decoding_cache.h"
#include "fsdp/nn/layers/documents.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/rotary.h"

namespace fsdp::nn {

struct ScoreOptions {
  // Each position sees so many, itself included, and the work grows with sequence x window; 0: all
  // before it.
  int64_t window = 0;
  std::optional<double> scale = {};  // of scores; none: 1 / sqrt(head_dim)
};

// [batch, heads, positions, head_dim] each; the queries belong to the last positions. Keys and
// values may have fewer heads, each for a group of queries.
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const ScoreOptions& options = {});

// The same of [batch, positions, heads, head_dim], within each document.
at::Tensor attention_in_documents(const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const ScoreOptions& options,
                                  const std::shared_ptr<const Documents>& documents);

// Of tokens whose positions begin with `begin`, or with 0 in each document.
QueryAndKey rotated(const QueryAndKey& heads, Rotary& rotary, int64_t begin,
                    const std::shared_ptr<const Documents>& documents);

// Appends positions to the kept ones, and keeps the result.
at::Tensor appended(at::Tensor& kept, const at::Tensor& more);

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
class AttentionImpl : public torch::nn::Module, public TokenParallelLayer {
 public:
  explicit AttentionImpl(const AttentionOptions& options);
  // [batch, sequence, hidden_size], like the result: of this rank's tokens. With a cache, they
  // follow the cached positions and are added to them. `documents`: of all ranks' tokens.
  at::Tensor forward(const at::Tensor& own, LayerCache* cache,
                     const std::shared_ptr<const Documents>& documents = nullptr);
  void join(const MeshAxis& tp) override;

 private:
  const AttentionOptions options_;
  Projection q_proj_, k_proj_, v_proj_, o_proj_;
  RmsNorm q_norm_{nullptr}, k_norm_{nullptr};
};
TORCH_MODULE(Attention);

}  // namespace fsdp::nn
