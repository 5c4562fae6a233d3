#include "fsdp/nn/hybrid.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/cross_entropy.h"
#include "fsdp/nn/layers/mamba2.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

namespace {

// down(relu(up(x))^2)
class SquaredReluMlpImpl : public torch::nn::Module {
 public:
  explicit SquaredReluMlpImpl(const NemotronHConfig& c)
      : up_proj_(register_module(
            "up_proj", Projection(ProjectionOptions{c.hidden_size, c.intermediate_size, c.mlp_bias,
                                                    c.initializer_range}))),
        down_proj_(register_module(
            "down_proj", Projection(ProjectionOptions{c.intermediate_size, c.hidden_size,
                                                      c.mlp_bias, c.initializer_range}))) {}
  at::Tensor forward(const at::Tensor& x) { return down_proj_(at::relu(up_proj_(x)).square()); }

 private:
  Projection up_proj_, down_proj_;
};
TORCH_MODULE(SquaredReluMlp);

// One mixer behind a norm; a letter of the pattern selects it.
class HybridBlockImpl : public torch::nn::Module {
 public:
  HybridBlockImpl(const NemotronHConfig& c, char kind, Recompute recompute)
      : recompute_(recompute),
        norm_(register_module("norm", RmsNorm(c.hidden_size, c.layer_norm_epsilon))) {
    if (kind == 'M')
      mamba_ = register_module("mixer", Mamba2(c));
    else if (kind == '*')
      attention_ = register_module(
          "mixer", Attention(AttentionOptions{.hidden_size = c.hidden_size,
                                              .num_heads = c.num_attention_heads,
                                              .num_kv_heads = c.num_key_value_heads,
                                              .head_dim = head_dim_of(c),
                                              .bias = c.attention_bias,
                                              .standard_deviation = c.initializer_range}));
    else
      mlp_ = register_module("mixer", SquaredReluMlp(c));
  }

  // Like LlamaBlockImpl's.
  at::Tensor forward(const at::Tensor& x, LayerCache* cache) {
    if (recompute_ == Recompute::kNone || cache != nullptr) return compute(x, cache);
    return recompute(
        [this](const std::vector<at::Tensor>& inputs) {
          return std::vector<at::Tensor>{compute(inputs[0], nullptr)};
        },
        {x})[0];
  }

 private:
  at::Tensor compute(const at::Tensor& x, LayerCache* cache) {
    const NormedBranch branch = norm_->branch(x);
    return branch.around + mix(branch.normed, cache);
  }

  at::Tensor mix(const at::Tensor& x, LayerCache* cache) {
    if (!mamba_.is_empty()) return mamba_(x, cache);
    return attention_.is_empty() ? mlp_(x) : attention_(x, cache);
  }

  const Recompute recompute_;
  RmsNorm norm_;
  Mamba2 mamba_{nullptr};
  Attention attention_{nullptr};
  SquaredReluMlp mlp_{nullptr};
};
TORCH_MODULE(HybridBlock);

class Hybrid final : public LanguageModel, public TokenParallelLayer {
 public:
  Hybrid(const NemotronHConfig& c, Recompute recompute)
      : LanguageModel(c, {{"lm_head.norm.weight", {"backbone.norm_f.weight"}}}) {
    auto backbone = register_module("backbone", std::make_shared<torch::nn::Module>());
    embedding_ = backbone->register_module(
        "embeddings", Unit<Embedding>(c.vocab_size, c.hidden_size, c.initializer_range));
    torch::nn::ModuleList layers;
    for (const char kind : c.hybrid_override_pattern) {
      blocks_.emplace_back(c, kind, recompute);
      layers->push_back(blocks_.back());
    }
    backbone->register_module("layers", layers);
    head_ = register_module("lm_head",
                            Unit<Head>(head_options(c, c.layer_norm_epsilon, embedding_->weight)));
  }

  at::Tensor logits(const at::Tensor& tokens) override {
    return head_(hidden_of(tokens, nullptr), HeadInput::kHidden);
  }

  at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) override {
    const at::NoGradGuard no_grad;
    cache.layers.resize(blocks_.size());
    return head_(last_position(hidden_of(tokens, &cache)), HeadInput::kHidden).squeeze(1);
  }

  ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets) override {
    const at::Tensor next = cross_entropy(logits(tokens), targets);
    return {next, {{"cross_entropy", next.detach()}}};
  }

  void join(const MeshAxis& tp) override { check_tensor_ranks(config(), tp.size()); }

 private:
  at::Tensor hidden_of(const at::Tensor& tokens, DecodingCache* cache) {
    at::Tensor x = embedding_(tokens);
    for (size_t i = 0; i < blocks_.size(); ++i)
      x = blocks_[i](x, cache == nullptr ? nullptr : &cache->layers[i]);
    return x;
  }

  Unit<Embedding> embedding_{nullptr};
  std::vector<Unit<HybridBlock>> blocks_;
  Unit<Head> head_{nullptr};
};

}  // namespace

std::shared_ptr<LanguageModel> make_hybrid(const NemotronHConfig& config, Recompute recompute) {
  return std::make_shared<Hybrid>(config, recompute);
}

}  // namespace fsdp::nn
