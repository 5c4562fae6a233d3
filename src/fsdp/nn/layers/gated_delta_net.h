// The Gated DeltaNet mixer with the parameters and names of Qwen3-Next.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/nn/layers/causal_conv.h"
#include "fsdp/nn/layers/decoding_cache.h"
#include "fsdp/nn/layers/documents.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/nn/layers/tensor_ranks.h"

namespace fsdp::nn {

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
class GatedDeltaNetImpl : public torch::nn::Module, public NamedInit, public TokenParallelLayer {
 public:
  explicit GatedDeltaNetImpl(const GatedDeltaNetOptions& options);
  // [batch, sequence, hidden_size], like the result: of this rank's tokens. With a cache, they
  // follow the cached positions and join them. Each of the documents begins with an empty state.
  at::Tensor forward(const at::Tensor& own, LayerCache* cache,
                     const std::shared_ptr<const Documents>& documents = nullptr);
  void reset_parameters() override;
  TpPlacement tp_placement(const std::string& parameter) const override;
  void join(const MeshAxis& tp) override;

 private:
  const GatedDeltaNetOptions options_;
  int64_t num_key_heads_;       // of this rank
  at::Tensor dt_bias_, a_log_;  // [value heads]
  Projection in_proj_qkvz_, in_proj_ba_;
  CausalConv conv1d_;
  RmsNorm norm_;
  Projection out_proj_;
};
TORCH_MODULE(GatedDeltaNet);

}  // namespace fsdp::nn
