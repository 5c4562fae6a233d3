// The Llama family as a language model: dense or with experts, with attention, latent attention or
// Gated DeltaNet, with or without multi-token prediction.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/expert_loads.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/gated_delta_net.h"
#include "fsdp/nn/layers/latent_attention.h"
#include "fsdp/nn/layers/rms_norm.h"

namespace fsdp::nn {

// --- layers --------------------------------------------------------------------------------------

struct LlamaBlockOptions {
  LlamaConfig config;
  NormWeight norm_weight = NormWeight::kFactor;  // of all norms of the layer
  bool is_attention_gated = false;
  // With key heads: the layer's mixer instead of attention.
  GatedDeltaNetOptions delta_net = {};
  // With heads: likewise.
  LatentAttentionOptions latent_attention = {};
  // Without experts: a dense MLP.
  ExpertsOptions experts = {};
  std::string experts_module = {};  // its name in the layer
  Recompute recompute = Recompute::kNone;
  std::shared_ptr<Rotary> rotary = nullptr;
};

// The parts of a layer, registered in the module that owns them.
class LlamaLayerParts {
 public:
  LlamaLayerParts(torch::nn::Module& owner, const LlamaBlockOptions& options);
  // `token_weight` is for the router.
  BlockOutput operator()(const at::Tensor& x, LayerCache* cache,
                         const std::shared_ptr<const Documents>& documents,
                         const at::Tensor& token_weight = {});

 private:
  at::Tensor mix(const at::Tensor& x, LayerCache* cache,
                 const std::shared_ptr<const Documents>& documents);

  RmsNorm input_norm_;
  Attention attention_{nullptr};
  GatedDeltaNet delta_net_{nullptr};
  LatentAttention latent_attention_{nullptr};
  RmsNorm mlp_norm_{nullptr};
  Mlp mlp_{nullptr};
  Experts experts_{nullptr};
  const double capacity_factor_;
};

class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaBlockOptions& options);
  // `cache` holds the positions before x, without gradients; nullptr in training.
  BlockOutput forward(const at::Tensor& x, LayerCache* cache,
                      const std::shared_ptr<const Documents>& documents);

 private:
  const Recompute recompute_;
  LlamaLayerParts layer_;
};
TORCH_MODULE(LlamaBlock);

// A layer that predicts one more token, as in DeepSeek-V3: joins the hidden state of a position
// with the embedding of the next token.
class PredictionBlockImpl : public torch::nn::Module {
 public:
  explicit PredictionBlockImpl(const LlamaBlockOptions& options);
  // Both of equal shape; token_weight: ShiftedBatch's. Returns the hidden state, then the same
  // normed for the head.
  BlockOutput forward(const at::Tensor& hidden, const at::Tensor& embedded,
                      const at::Tensor& token_weight,
                      const std::shared_ptr<const Documents>& documents);

 private:
  BlockOutput compute(const at::Tensor& hidden, const at::Tensor& embedded,
                      const at::Tensor& token_weight,
                      const std::shared_ptr<const Documents>& documents);

  const Recompute recompute_;
  RmsNorm embedding_norm_;
  RmsNorm hidden_norm_;
  Projection joined_;
  LlamaLayerParts layer_;
  RmsNorm head_norm_;
};
TORCH_MODULE(PredictionBlock);

// `config` holds a trainable one of any architecture but NemotronHConfig. Leaves values unset.
std::shared_ptr<LanguageModel> make_llama(const ModelConfig& config, const BuildOptions& options);

}  // namespace fsdp::nn
