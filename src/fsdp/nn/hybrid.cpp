#include "fsdp/nn/hybrid.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <string>
#include <utility>
#include <vector>

#include "fsdp/nn/decoder.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/mamba2.h"
#include "fsdp/nn/layers/rms_norm.h"
#include "fsdp/shard/recompute.h"

namespace fsdp::nn {

namespace {

RmsNorm norm_of(const NemotronHConfig& c) { return RmsNorm(c.hidden_size, c.layer_norm_epsilon); }

AttentionOptions attention_options(const NemotronHConfig& c) {
  return {.hidden_size = c.hidden_size,
          .num_heads = c.num_attention_heads,
          .num_kv_heads = c.num_key_value_heads,
          .head_dim = head_dim_of(c),
          .bias = c.attention_bias,
          .output_bias = c.attention_bias,
          .standard_deviation = c.initializer_range};
}

MlpOptions mlp_options(const NemotronHConfig& c) {
  return {.hidden_size = c.hidden_size,
          .intermediate_size = c.intermediate_size,
          .kind = MlpKind::kSquaredRelu,
          .bias = c.mlp_bias,
          .standard_deviation = c.initializer_range,
          .is_cut = true};
}

ExpertsOptions experts_options(const NemotronHConfig& c, double capacity_factor) {
  return {.router = {.hidden_size = c.hidden_size,
                     .num_experts = c.n_routed_experts,
                     .num_chosen = c.num_experts_per_tok,
                     .score = RouterScore::kSigmoid,
                     .num_groups = c.n_group,
                     .num_open_groups = c.topk_group,
                     .normalizes = c.norm_topk_prob,
                     .scale = c.routed_scaling_factor,
                     .has_bias = true,
                     .bias_rate = c.router_bias_update_rate,
                     .standard_deviation = c.initializer_range},
          .intermediate_size = c.moe_intermediate_size,
          .kind = MlpKind::kSquaredRelu,
          .latent_size = c.moe_latent_size,
          .shared_size = c.moe_shared_expert_intermediate_size,
          .shared_module = "shared_experts",
          .bias = c.mlp_bias,
          .capacity_factor = capacity_factor};
}

// What a layer of a prediction has besides its mixer: the first one joins the state with the
// embedding of a later token, the last one has a norm for the head.
struct PredictionPart {
  bool is_first = false;
  bool is_last = false;
};

// One mixer behind a norm; a letter of the pattern selects it.
class HybridBlockImpl : public torch::nn::Module {
 public:
  HybridBlockImpl(const NemotronHConfig& c, char kind, const BuildOptions& build,
                  const PredictionPart& part = {})
      : recompute_(build.recompute), capacity_factor_(build.expert_capacity) {
    if (part.is_first) {
      embedding_norm_ = register_module("enorm", norm_of(c));
      hidden_norm_ = register_module("hnorm", norm_of(c));
      joined_ = register_module(
          "eh_proj", Projection(ProjectionOptions{.in = 2 * c.hidden_size,
                                                  .out = c.hidden_size,
                                                  .standard_deviation = c.initializer_range}));
    }
    norm_ = register_module("norm", norm_of(c));
    if (kind == 'M')
      mamba_ = register_module("mixer", Mamba2(c));
    else if (kind == '*')
      attention_ = register_module("mixer", Attention(attention_options(c)));
    else if (kind == 'E')
      experts_ = register_module("mixer", Experts(experts_options(c, build.expert_capacity)));
    else
      mlp_ = register_module("mixer", Mlp(mlp_options(c)));
    if (part.is_last) head_norm_ = register_module("final_layernorm", norm_of(c));
  }

  // `embedded`: of the first layer of a prediction. The last one's output is the hidden state, then
  // the same normed for the head. token_weight: as of Router. Recomputes like LlamaBlockImpl.
  BlockOutput forward(const at::Tensor& x, LayerCache* cache,
                      const std::shared_ptr<const Documents>& documents,
                      const at::Tensor& embedded = {}, const at::Tensor& token_weight = {}) {
    if (recompute_ == Recompute::kNone || cache != nullptr)
      return compute(x, cache, documents, embedded, token_weight);
    std::vector<at::Tensor> differentiable = {x};
    if (embedded.defined()) differentiable.push_back(embedded);
    return recompute(
        [this, documents, token_weight](const std::vector<at::Tensor>& inputs) {
          return compute(inputs[0], nullptr, documents,
                         inputs.size() > 1 ? inputs[1] : at::Tensor(), token_weight);
        },
        differentiable);
  }

 private:
  BlockOutput compute(const at::Tensor& x, LayerCache* cache,
                      const std::shared_ptr<const Documents>& documents, const at::Tensor& embedded,
                      const at::Tensor& token_weight) {
    const NormedBranch branch = norm_->branch(embedded.defined() ? join(x, embedded) : x);
    BlockOutput output;
    if (experts_.is_empty()) {
      output.push_back(branch.around + mix(branch.normed, cache, documents));
    } else {
      RoutedTokens routed = experts_(branch.normed, token_weight);
      output.push_back(branch.around + routed.output);
      append_load(std::move(routed.load), capacity_factor_, output);
    }
    if (!head_norm_.is_empty()) output.insert(output.begin() + 1, head_norm_(output[0]));
    return output;
  }

  at::Tensor join(const at::Tensor& hidden, const at::Tensor& embedded) {
    return joined_(at::cat({embedding_norm_(embedded), hidden_norm_(hidden)}, -1));
  }

  at::Tensor mix(const at::Tensor& x, LayerCache* cache,
                 const std::shared_ptr<const Documents>& documents) {
    if (!mamba_.is_empty()) return mamba_(x, cache, documents);
    return attention_.is_empty() ? mlp_(x) : attention_(x, cache, documents);
  }

  const Recompute recompute_;
  const double capacity_factor_;
  RmsNorm embedding_norm_{nullptr};
  RmsNorm hidden_norm_{nullptr};
  Projection joined_{nullptr};
  RmsNorm norm_{nullptr};
  Mamba2 mamba_{nullptr};
  Attention attention_{nullptr};
  Experts experts_{nullptr};
  Mlp mlp_{nullptr};
  RmsNorm head_norm_{nullptr};
};
TORCH_MODULE(HybridBlock);

// Published layers of multi-token prediction, of a model that is configured without them.
std::vector<std::string> hybrid_ignored_names(const NemotronHConfig& c) {
  if (c.num_nextn_predict_layers == 0) return {"mtp.*"};
  return {};
}

class Hybrid final : public Decoder {
 public:
  Hybrid(const NemotronHConfig& c, const BuildOptions& build)
      : Decoder(c, {"lm_head.norm.weight", {"backbone.norm_f.weight"}}, hybrid_ignored_names(c),
                {.prediction_weight = c.mtp_loss_weight,
                 .balance_weight = c.router_aux_loss_coef,
                 .capacity_factor = build.expert_capacity}) {
    auto backbone = register_module("backbone", std::make_shared<torch::nn::Module>());
    embedding_ = backbone->register_module(
        "embeddings", Unit<Embedding>(c.vocab_size, c.hidden_size, c.initializer_range));
    torch::nn::ModuleList layers;
    for (const char kind : c.hybrid_override_pattern) {
      Unit<HybridBlock> block(c, kind, build);
      layers->push_back(block);
      blocks_.push_back([block](const at::Tensor& x, LayerCache* cache,
                                const std::shared_ptr<const Documents>& documents) mutable {
        return block(x, cache, documents);
      });
    }
    backbone->register_module("layers", layers);
    head_ = register_module(
        "lm_head",
        Unit<Head>(head_options(c, c.layer_norm_epsilon, embedding_->weight, build.logit_bytes)));
    if (c.num_nextn_predict_layers > 0) add_predictors(c, build);
  }

 private:
  // As published: the layers of all predictions are one list.
  void add_predictors(const NemotronHConfig& c, const BuildOptions& build) {
    const std::string& pattern = c.mtp_hybrid_override_pattern;
    torch::nn::ModuleList layers;
    for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
      std::vector<Unit<HybridBlock>> blocks;
      for (size_t k = 0; k < pattern.size(); ++k) {
        blocks.emplace_back(c, pattern[k], build, PredictionPart{k == 0, k + 1 == pattern.size()});
        layers->push_back(blocks.back());
      }
      predictors_.push_back([blocks](const at::Tensor& hidden, const at::Tensor& embedded,
                                     const at::Tensor& token_weight,
                                     const std::shared_ptr<const Documents>& documents,
                                     ExpertLoads& loads) mutable {
        BlockOutput output = {hidden};
        for (size_t k = 0; k < blocks.size(); ++k) {
          output = blocks[k](output[0], nullptr, documents, k == 0 ? embedded : at::Tensor(),
                             token_weight);
          loads.take(output);
        }
        return Prediction{std::move(output[0]), std::move(output[1])};
      });
    }
    register_module("mtp", std::make_shared<torch::nn::Module>())
        ->register_module("layers", layers);
  }
};

}  // namespace

std::shared_ptr<LanguageModel> make_hybrid(const NemotronHConfig& config,
                                           const BuildOptions& options) {
  return std::make_shared<Hybrid>(config, options);
}

}  // namespace fsdp::nn
