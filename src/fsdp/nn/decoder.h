// The common part of all families of language models: an embedding, blocks one after the other, a
// head, and blocks that predict more tokens; their logits and their loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/mixer.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

// --- the parts of a model, under the names of published checkpoints ------------------------------

// x + module(norm(x))
struct Branch {
  std::string norm_name;
  std::string name;
  std::variant<std::shared_ptr<Mixer>, Mlp, Experts> module;
};

struct BlockParts {
  std::vector<Branch> branches;
  // The first block of a prediction joins the hidden state of a position with the embedding of a
  // later token, as in DeepSeek-V3; the last one has a norm for the head, under this path.
  bool joins_embedding = false;
  std::vector<std::string> head_norm_path = {};
};

struct DecoderParts {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  double norm_eps = 1e-5;
  NormWeight norm_weight = NormWeight::kFactor;
  double standard_deviation = 0.02;
  bool is_tied = false;  // the embedding is also the output matrix

  std::string body = {};  // the module of embedding and blocks, and their names in it
  std::string embedding_name = {};
  std::string head_norm_name = {};  // in published checkpoints; here it is in the head
  std::vector<BlockParts> blocks = {};
  // The blocks of every further token, which are beside the main ones or in a module of their own.
  std::vector<std::vector<BlockParts>> predictions = {};
  std::string predictions_body = {};
  std::vector<std::string> ignored_names = {};

  double prediction_weight = 0.0;  // in the loss, of the mean of all predictions of later tokens
  double balance_weight = 0.0;     // in the loss, of load_balancing_loss()
};

// The facts that all configurations call alike.
template <typename Config>
DecoderParts common_parts(const Config& c, double norm_eps) {
  return {.vocab_size = c.vocab_size,
          .hidden_size = c.hidden_size,
          .norm_eps = norm_eps,
          .standard_deviation = c.initializer_range,
          .is_tied = c.tie_word_embeddings,
          .prediction_weight = c.mtp_loss_weight};
}

// DeepSeek-V3's router, which evens out its load by biases.
template <typename Config>
RouterOptions biased_router(const Config& c, int64_t hidden_size, double standard_deviation) {
  return {.hidden_size = hidden_size,
          .num_experts = c.n_routed_experts,
          .num_chosen = c.num_experts_per_tok,
          .score = RouterScore::kSigmoid,
          .num_groups = c.n_group,
          .num_open_groups = c.topk_group,
          .normalizes = c.norm_topk_prob,
          .scale = c.routed_scaling_factor,
          .has_bias = true,
          .bias_rate = c.router_bias_update_rate,
          .standard_deviation = standard_deviation};
}

// For a trainable configuration.
DecoderParts decoder_parts(const LlamaConfig& config, const BuildOptions& options);
DecoderParts decoder_parts(const MixtralConfig& config, const BuildOptions& options);
DecoderParts decoder_parts(const Qwen3NextConfig& config, const BuildOptions& options);
DecoderParts decoder_parts(const DeepseekV3Config& config, const BuildOptions& options);
DecoderParts decoder_parts(const NemotronHConfig& config, const BuildOptions& options);

// --- the model -----------------------------------------------------------------------------------

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(const BlockParts& parts, const DecoderParts& model, const BuildOptions& options);
  // The hidden state, the same normed for the head of a prediction, and then loads of experts.
  BlockOutput forward(const at::Tensor& x, const LayerContext& context);

 private:
  struct NormedModule {
    RmsNorm norm;
    std::variant<std::shared_ptr<Mixer>, Mlp, Experts> module;
  };
  BlockOutput compute(const at::Tensor& x, const LayerContext& context);
  at::Tensor apply(NormedModule& branch, const at::Tensor& x, const LayerContext& context,
                   BlockOutput& loads) const;

  const Recompute recompute_;
  const double expert_capacity_;
  RmsNorm embedding_norm_{nullptr};  // joins_embedding
  RmsNorm hidden_norm_{nullptr};
  Projection joined_{nullptr};
  std::vector<NormedModule> branches_;
  RmsNorm head_norm_{nullptr};
};
TORCH_MODULE(Block);

class Decoder final : public LanguageModel, public TokenParallelLayer {
 public:
  Decoder(const ModelConfig& config, const DecoderParts& parts, const BuildOptions& options);
  at::Tensor logits(const at::Tensor& tokens,
                    const std::shared_ptr<const Documents>& documents) override;
  at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) override;
  ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets,
                 const std::shared_ptr<const Documents>& documents) override;
  void join(const MeshAxis& tp) override;

 private:
  at::Tensor hidden_of(const at::Tensor& tokens, const std::shared_ptr<const Documents>& documents,
                       ExpertLoads& loads, DecodingCache* cache);
  void add_predictions(const at::Tensor& tokens, const at::Tensor& targets,
                       const std::shared_ptr<const Documents>& documents, at::Tensor hidden,
                       ExpertLoads& loads, ModelLoss& loss);

  const double expert_capacity_;
  const double prediction_weight_;
  const double balance_weight_;
  Unit<Embedding> embedding_{nullptr};
  std::vector<Unit<Block>> blocks_;
  std::vector<std::vector<Unit<Block>>> predictions_;  // each from the state of the one before
  Unit<Head> head_{nullptr};
};

}  // namespace fsdp::nn
