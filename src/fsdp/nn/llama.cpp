#include "fsdp/nn/llama.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/cross_entropy.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/shard/recompute.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

namespace {

RmsNorm norm_of(const LlamaConfig& c) { return RmsNorm(c.hidden_size, c.rms_norm_eps); }

Attention attention_of(const LlamaBlockOptions& options) {
  const LlamaConfig& c = options.config;
  return Attention(AttentionOptions{.hidden_size = c.hidden_size,
                                    .num_heads = c.num_attention_heads,
                                    .num_kv_heads = c.num_key_value_heads,
                                    .head_dim = head_dim_of(c),
                                    .bias = c.attention_bias,
                                    .qk_norm_eps = c.qk_norm ? c.rms_norm_eps : 0.0,
                                    .standard_deviation = c.initializer_range,
                                    .rotary = options.rotary});
}

// Published checkpoints keep the norm of a prediction layer's head in a module of its own.
RmsNorm shared_head_norm(torch::nn::Module& owner, const LlamaConfig& c) {
  auto shared_head = owner.register_module("shared_head", std::make_shared<torch::nn::Module>());
  return shared_head->register_module("norm", norm_of(c));
}

const LlamaConfig& llama_decoder_of(const ModelConfig& config) {
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

std::vector<StoredName> llama_stored_names(const ModelConfig& config) {
  std::vector<StoredName> names = {{"lm_head.norm.weight", {"model.norm.weight"}}};
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  if (mixtral == nullptr) return names;
  for (StackedExperts& stack : stacked_experts(expert_names(*mixtral)))
    names.push_back({std::move(stack.name), std::move(stack.parts)});
  return names;
}

class Llama final : public LanguageModel, public TokenParallelLayer {
 public:
  Llama(const ModelConfig& config, const BuildOptions& build)
      : LanguageModel(config, llama_stored_names(config)),
        decoder_(llama_decoder_of(this->config())),
        num_load_tensors_(build.expert_capacity > 0 ? 3 : 2) {
    const LlamaConfig& c = decoder_;
    auto model = register_module("model", std::make_shared<torch::nn::Module>());
    embedding_ = model->register_module(
        "embed_tokens", Unit<Embedding>(c.vocab_size, c.hidden_size, c.initializer_range));
    torch::nn::ModuleList layers;
    const LlamaBlockOptions options{.config = c,
                                    .experts = experts_of(config, build.expert_capacity),
                                    .experts_module = experts_module_of(config),
                                    .recompute = build.recompute,
                                    .rotary = std::make_shared<Rotary>(c)};
    for (int64_t i = 0; i < c.num_hidden_layers; ++i) {
      blocks_.emplace_back(options);
      layers->push_back(blocks_.back());
    }
    for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
      predictions_.emplace_back(options);
      layers->push_back(predictions_.back());
    }
    model->register_module("layers", layers);
    head_ =
        register_module("lm_head", Unit<Head>(head_options(c, c.rms_norm_eps, embedding_->weight)));
  }

  at::Tensor logits(const at::Tensor& tokens) override {
    std::vector<RouterLoad> loads;
    return whole_logits(head_(hidden_of(tokens, loads, nullptr), HeadInput::kHidden),
                        head_->ranks());
  }

  at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) override {
    if (tp() != nullptr)
      throw UsageError(concat(
          "tp = ", tp()->size(),
          " ranks share the tokens of a sequence, so they cannot decode one after the other; "
          "load the checkpoint on a mesh without tp"));
    const at::NoGradGuard no_grad;
    std::vector<RouterLoad> loads;
    cache.layers.resize(blocks_.size());
    return head_(last_position(hidden_of(tokens, loads, &cache)), HeadInput::kHidden).squeeze(1);
  }

  ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets) override {
    std::vector<RouterLoad> loads;
    const at::Tensor hidden = hidden_of(tokens, loads, nullptr);
    const at::Tensor next =
        cross_entropy(head_(hidden, HeadInput::kHidden), targets, head_->ranks());
    ModelLoss loss{next, {{"cross_entropy", next.detach()}}};
    if (!predictions_.empty()) add_predictions(tokens, targets, hidden, loads, loss);
    if (!loads.empty()) add_balance(loads, loss);
    return loss;
  }

  void join(const MeshAxis& tp) override {
    check_tensor_ranks(config(), tp.size());
    TokenParallelLayer::join(tp);
  }

 private:
  at::Tensor hidden_of(const at::Tensor& tokens, std::vector<RouterLoad>& loads,
                       DecodingCache* cache) {
    at::Tensor x = embedding_(tokens);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      BlockOutput output = blocks_[i](x, cache == nullptr ? nullptr : &cache->layers[i]);
      note_load(output, loads);
      x = std::move(output[0]);
    }
    return x;
  }

  void note_load(const BlockOutput& output, std::vector<RouterLoad>& loads) const {
    if (output.size() <= num_load_tensors_) return;
    const auto first = output.end() - static_cast<ptrdiff_t>(num_load_tensors_);
    loads.push_back({first[0], first[1], num_load_tensors_ == 3 ? first[2] : at::Tensor()});
  }

  // Layer k joins position i's state with the token at i + k and predicts the token after that.
  void add_predictions(const at::Tensor& tokens, const at::Tensor& targets, at::Tensor hidden,
                       std::vector<RouterLoad>& loads, ModelLoss& loss) {
    at::Tensor sum;
    int64_t offset = 0;
    for (Unit<PredictionBlock>& prediction : predictions_) {
      ++offset;
      const int64_t length = tokens.size(1) - offset;
      FSDP_CHECK(length > 0, "a sequence has ", tokens.size(1),
                 " tokens; multi-token prediction needs more than num_nextn_predict_layers = ",
                 predictions_.size());
      const at::Tensor embedded = embedding_(tokens.narrow(1, offset, length));
      BlockOutput output = prediction(hidden.narrow(1, 0, length), embedded);
      note_load(output, loads);
      const at::Tensor term =
          cross_entropy(head_(output[1], HeadInput::kNormed), targets.narrow(1, offset, length));
      sum = sum.defined() ? sum + term : term;
      hidden = std::move(output[0]);
    }
    const at::Tensor mean = sum / static_cast<double>(offset);
    loss.total = loss.total + mean * decoder_.mtp_loss_weight;
    loss.terms.push_back({"mtp", mean.detach()});
  }

  void add_balance(const std::vector<RouterLoad>& loads, ModelLoss& loss) const {
    const at::Tensor balance = load_balancing_loss(loads, tp());
    loss.total = loss.total + balance * std::get<MixtralConfig>(config()).router_aux_loss_coef;
    loss.terms.push_back({"load_balance", balance.detach()});
    if (num_load_tensors_ < 3) return;
    std::vector<at::Tensor> dropped;
    for (const RouterLoad& load : loads) dropped.push_back(load.dropped);
    loss.terms.push_back({"dropped", mean_over_ranks(at::cat(dropped).mean(), tp())});
  }

  const LlamaConfig& decoder_;
  const size_t num_load_tensors_;  // of a layer with experts
  Unit<Embedding> embedding_{nullptr};
  std::vector<Unit<LlamaBlock>> blocks_;
  std::vector<Unit<PredictionBlock>> predictions_;
  Unit<Head> head_{nullptr};
};

}  // namespace

LlamaLayerParts::LlamaLayerParts(torch::nn::Module& owner, const LlamaBlockOptions& options)
    : input_norm_(owner.register_module("input_layernorm", norm_of(options.config))),
      attention_(owner.register_module("self_attn", attention_of(options))),
      mlp_norm_(owner.register_module("post_attention_layernorm", norm_of(options.config))),
      capacity_factor_(options.experts.capacity_factor) {
  const LlamaConfig& c = options.config;
  if (options.experts.router.num_experts > 0)
    experts_ = owner.register_module(options.experts_module, Experts(options.experts));
  else
    mlp_ = owner.register_module("mlp", GatedMlp(GatedMlpOptions{c.hidden_size, c.intermediate_size,
                                                                 c.mlp_bias, c.initializer_range,
                                                                 /*is_cut=*/true}));
}

BlockOutput LlamaLayerParts::operator()(const at::Tensor& x, LayerCache* cache) {
  const NormedBranch first = input_norm_->branch(x);
  const NormedBranch second = mlp_norm_->branch(first.around, attention_(first.normed, cache));
  if (experts_.is_empty()) return {second.around + mlp_(second.normed)};
  RoutedTokens routed = experts_(second.normed);
  BlockOutput output = {second.around + routed.output, std::move(routed.load.mean_probability),
                        std::move(routed.load.share)};
  if (capacity_factor_ > 0)
    output.push_back(routed.load.dropped.defined() ? routed.load.dropped
                                                   : at::zeros({1}, output[2].options()));
  return output;
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaBlockOptions& options)
    : recompute_(options.recompute), layer_(*this, options) {}

BlockOutput LlamaBlockImpl::forward(const at::Tensor& x, LayerCache* cache) {
  if (recompute_ == Recompute::kNone || cache != nullptr) return layer_(x, cache);
  // Inside the unit, so that its weights are gathered ahead of the backward as usual.
  return recompute(
      [this](const std::vector<at::Tensor>& inputs) { return layer_(inputs[0], nullptr); }, {x});
}

PredictionBlockImpl::PredictionBlockImpl(const LlamaBlockOptions& options)
    : recompute_(options.recompute),
      embedding_norm_(register_module("enorm", norm_of(options.config))),
      hidden_norm_(register_module("hnorm", norm_of(options.config))),
      joined_(register_module(
          "eh_proj",
          Projection(ProjectionOptions{.in = 2 * options.config.hidden_size,
                                       .out = options.config.hidden_size,
                                       .standard_deviation = options.config.initializer_range}))),
      layer_(*this, options),
      head_norm_(shared_head_norm(*this, options.config)) {}

BlockOutput PredictionBlockImpl::compute(const at::Tensor& hidden, const at::Tensor& embedded) {
  BlockOutput output =
      layer_(joined_(at::cat({embedding_norm_(embedded), hidden_norm_(hidden)}, -1)), nullptr);
  output.insert(output.begin() + 1, head_norm_(output[0]));
  return output;
}

BlockOutput PredictionBlockImpl::forward(const at::Tensor& hidden, const at::Tensor& embedded) {
  if (recompute_ == Recompute::kNone) return compute(hidden, embedded);
  return recompute(
      [this](const std::vector<at::Tensor>& inputs) { return compute(inputs[0], inputs[1]); },
      {hidden, embedded});
}

std::shared_ptr<LanguageModel> make_llama(const ModelConfig& config, const BuildOptions& options) {
  return std::make_shared<Llama>(config, options);
}

}  // namespace fsdp::nn
