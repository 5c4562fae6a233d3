#include "fsdp/nn/llama.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

#include "fsdp/nn/decoder.h"
#include "fsdp/nn/deepseek_v3.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/qwen3_next.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

namespace {

RmsNorm norm_of(const LlamaBlockOptions& options) {
  return RmsNorm(options.config.hidden_size, options.config.rms_norm_eps, options.norm_weight);
}

Attention attention_of(const LlamaBlockOptions& options) {
  const LlamaConfig& c = options.config;
  return Attention(AttentionOptions{.hidden_size = c.hidden_size,
                                    .num_heads = c.num_attention_heads,
                                    .num_kv_heads = c.num_key_value_heads,
                                    .head_dim = head_dim_of(c),
                                    .bias = has_qkv_bias(c),
                                    .output_bias = c.attention_bias,
                                    .scores = {.window = c.sliding_window},
                                    .qk_norm_eps = c.qk_norm ? c.rms_norm_eps : 0.0,
                                    .qk_norm_weight = options.norm_weight,
                                    .is_gated = options.is_attention_gated,
                                    .standard_deviation = c.initializer_range,
                                    .rotary = options.rotary});
}

// Published checkpoints keep the norm of a prediction layer's head in a module of its own.
RmsNorm shared_head_norm(torch::nn::Module& owner, const LlamaBlockOptions& options) {
  auto shared_head = owner.register_module("shared_head", std::make_shared<torch::nn::Module>());
  return shared_head->register_module("norm", norm_of(options));
}

const LlamaConfig& llama_decoder_of(const ModelConfig& config) {
  if (const auto* deepseek = std::get_if<DeepseekV3Config>(&config)) return deepseek->decoder;
  if (const auto* next = std::get_if<Qwen3NextConfig>(&config)) return next->decoder;
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  return mixtral != nullptr ? mixtral->decoder : std::get<LlamaConfig>(config);
}

ExpertsOptions experts_of(const ModelConfig& config, double capacity_factor) {
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  if (mixtral == nullptr) return {};
  return {.router = {.hidden_size = mixtral->decoder.hidden_size,
                     .num_experts = mixtral->num_local_experts,
                     .num_chosen = mixtral->num_experts_per_tok,
                     .normalizes = mixtral->norm_topk_prob,
                     .standard_deviation = mixtral->decoder.initializer_range},
          .intermediate_size = mixtral->decoder.intermediate_size,
          .shared_size = mixtral->shared_expert_intermediate_size,
          .capacity_factor = capacity_factor};
}

std::string experts_module_of(const ModelConfig& config) {
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  return mixtral == nullptr ? "" : experts_module(*mixtral);
}

double balance_weight_of(const ModelConfig& config) {
  if (const auto* deepseek = std::get_if<DeepseekV3Config>(&config))
    return deepseek->router_aux_loss_coef;
  if (const auto* next = std::get_if<Qwen3NextConfig>(&config)) return next->router_aux_loss_coef;
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  return mixtral == nullptr ? 0.0 : mixtral->router_aux_loss_coef;
}

// For each layer, and in the end for a layer that predicts one more token.
std::vector<LlamaBlockOptions> llama_blocks(const ModelConfig& config, const BuildOptions& build) {
  if (const auto* next = std::get_if<Qwen3NextConfig>(&config))
    return qwen3_next_blocks(*next, build);
  if (const auto* deepseek = std::get_if<DeepseekV3Config>(&config))
    return deepseek_v3_blocks(*deepseek, build);
  const LlamaConfig& c = llama_decoder_of(config);
  return std::vector<LlamaBlockOptions>(static_cast<size_t>(c.num_hidden_layers + 1),
                                        {.config = c,
                                         .experts = experts_of(config, build.expert_capacity),
                                         .experts_module = experts_module_of(config),
                                         .recompute = build.recompute,
                                         .rotary = std::make_shared<Rotary>(c)});
}

// Of Qwen3-Next the layers of multi-token prediction, which `transformers` leaves out, too.
std::vector<std::string> llama_ignored_names(const ModelConfig& config) {
  if (const auto* deepseek = std::get_if<DeepseekV3Config>(&config))
    return deepseek_v3_ignored_names(*deepseek);
  if (std::holds_alternative<Qwen3NextConfig>(config)) return {"mtp.*"};
  return {};
}

class Llama final : public Decoder {
 public:
  Llama(const ModelConfig& config, const BuildOptions& build)
      : Decoder(config, {"lm_head.norm.weight", {"model.norm.weight"}}, llama_ignored_names(config),
                {.prediction_weight = llama_decoder_of(config).mtp_loss_weight,
                 .balance_weight = balance_weight_of(config),
                 .capacity_factor = build.expert_capacity}) {
    const LlamaConfig& c = llama_decoder_of(config);
    auto model = register_module("model", std::make_shared<torch::nn::Module>());
    embedding_ = model->register_module(
        "embed_tokens", Unit<Embedding>(c.vocab_size, c.hidden_size, c.initializer_range));
    torch::nn::ModuleList layers;
    const std::vector<LlamaBlockOptions> options = llama_blocks(config, build);
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      Unit<LlamaBlock> block(options[static_cast<size_t>(i)]);
      layers->push_back(block);
      blocks_.emplace_back(block);
    }
    for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
      Unit<PredictionBlock> block(options.back());
      layers->push_back(block);
      predictors_.push_back([block](const at::Tensor& hidden, const at::Tensor& embedded,
                                    const at::Tensor& token_weight,
                                    const std::shared_ptr<const Documents>& documents,
                                    ExpertLoads& loads) mutable {
        BlockOutput output = block(hidden, embedded, token_weight, documents);
        loads.take(output);
        return Prediction{std::move(output[0]), std::move(output[1])};
      });
    }
    model->register_module("layers", layers);
    HeadOptions head = head_options(c, c.rms_norm_eps, embedding_->weight, build.logit_bytes);
    head.norm_weight = options.back().norm_weight;
    head_ = register_module("lm_head", Unit<Head>(head));
  }
};

}  // namespace

LlamaLayerParts::LlamaLayerParts(torch::nn::Module& owner, const LlamaBlockOptions& options)
    : input_norm_(owner.register_module("input_layernorm", norm_of(options))),
      capacity_factor_(options.experts.capacity_factor) {
  const LlamaConfig& c = options.config;
  if (options.delta_net.num_key_heads > 0)
    delta_net_ = owner.register_module("linear_attn", GatedDeltaNet(options.delta_net));
  else if (options.latent_attention.num_heads > 0)
    latent_attention_ = owner.register_module(
        "self_attn", LatentAttention(options.latent_attention, options.rotary));
  else
    attention_ = owner.register_module("self_attn", attention_of(options));
  mlp_norm_ = owner.register_module("post_attention_layernorm", norm_of(options));
  if (options.experts.router.num_experts > 0)
    experts_ = owner.register_module(options.experts_module, Experts(options.experts));
  else
    mlp_ = owner.register_module(
        "mlp", Mlp(MlpOptions{c.hidden_size, c.intermediate_size, MlpKind::kGatedSilu, c.mlp_bias,
                              c.initializer_range,
                              /*is_cut=*/true}));
}

at::Tensor LlamaLayerParts::mix(const at::Tensor& x, LayerCache* cache,
                                const std::shared_ptr<const Documents>& documents) {
  if (!delta_net_.is_empty()) return delta_net_(x, cache, documents);
  return attention_.is_empty() ? latent_attention_(x, cache, documents)
                               : attention_(x, cache, documents);
}

BlockOutput LlamaLayerParts::operator()(const at::Tensor& x, LayerCache* cache,
                                        const std::shared_ptr<const Documents>& documents,
                                        const at::Tensor& token_weight) {
  const NormedBranch first = input_norm_->branch(x);
  const NormedBranch second = mlp_norm_->branch(first.around, mix(first.normed, cache, documents));
  if (experts_.is_empty()) return {second.around + mlp_(second.normed)};
  RoutedTokens routed = experts_(second.normed, token_weight);
  BlockOutput output = {second.around + routed.output};
  append_load(std::move(routed.load), capacity_factor_, output);
  return output;
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaBlockOptions& options)
    : recompute_(options.recompute), layer_(*this, options) {}

BlockOutput LlamaBlockImpl::forward(const at::Tensor& x, LayerCache* cache,
                                    const std::shared_ptr<const Documents>& documents) {
  if (recompute_ == Recompute::kNone || cache != nullptr) return layer_(x, cache, documents);
  // Inside the unit, so that its weights are gathered ahead of the backward as usual.
  return recompute(
      [this, documents](const std::vector<at::Tensor>& inputs) {
        return layer_(inputs[0], nullptr, documents);
      },
      {x});
}

PredictionBlockImpl::PredictionBlockImpl(const LlamaBlockOptions& options)
    : recompute_(options.recompute),
      embedding_norm_(register_module("enorm", norm_of(options))),
      hidden_norm_(register_module("hnorm", norm_of(options))),
      joined_(register_module(
          "eh_proj",
          Projection(ProjectionOptions{.in = 2 * options.config.hidden_size,
                                       .out = options.config.hidden_size,
                                       .standard_deviation = options.config.initializer_range}))),
      layer_(*this, options),
      head_norm_(shared_head_norm(*this, options)) {}

BlockOutput PredictionBlockImpl::compute(const at::Tensor& hidden, const at::Tensor& embedded,
                                         const at::Tensor& token_weight,
                                         const std::shared_ptr<const Documents>& documents) {
  BlockOutput output =
      layer_(joined_(at::cat({embedding_norm_(embedded), hidden_norm_(hidden)}, -1)), nullptr,
             documents, token_weight);
  output.insert(output.begin() + 1, head_norm_(output[0]));
  return output;
}

BlockOutput PredictionBlockImpl::forward(const at::Tensor& hidden, const at::Tensor& embedded,
                                         const at::Tensor& token_weight,
                                         const std::shared_ptr<const Documents>& documents) {
  if (recompute_ == Recompute::kNone) return compute(hidden, embedded, token_weight, documents);
  return recompute(
      [this, token_weight, documents](const std::vector<at::Tensor>& inputs) {
        return compute(inputs[0], inputs[1], token_weight, documents);
      },
      {hidden, embedded});
}

std::shared_ptr<LanguageModel> make_llama(const ModelConfig& config, const BuildOptions& options) {
  return std::make_shared<Llama>(config, options);
}

}  // namespace fsdp::nn
