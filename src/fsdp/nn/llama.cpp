#include "fsdp/nn/llama.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <utility>

#include "fsdp/nn/cross_entropy.h"
#include "fsdp/nn/embedding.h"
#include "fsdp/nn/head.h"
#include "fsdp/nn/llama_block.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

namespace {

const LlamaConfig& decoder_of(const ModelConfig& config) {
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  return mixtral != nullptr ? mixtral->decoder : std::get<LlamaConfig>(config);
}

ExpertsOptions experts_of(const ModelConfig& config) {
  const auto* mixtral = std::get_if<MixtralConfig>(&config);
  if (mixtral == nullptr) return {};
  return {.hidden_size = mixtral->decoder.hidden_size,
          .intermediate_size = mixtral->decoder.intermediate_size,
          .num_experts = mixtral->num_local_experts,
          .num_chosen = mixtral->num_experts_per_tok,
          .shared_size = mixtral->shared_expert_intermediate_size,
          .standard_deviation = mixtral->decoder.initializer_range};
}

class Llama final : public LanguageModel {
 public:
  Llama(const ModelConfig& config, Recompute recompute)
      : LanguageModel(config, {{"lm_head.norm.weight", "model.norm.weight"}}),
        decoder_(decoder_of(this->config())) {
    const LlamaConfig& c = decoder_;
    auto model = register_module("model", std::make_shared<torch::nn::Module>());
    embedding_ = model->register_module(
        "embed_tokens", Unit<Embedding>(c.vocab_size, c.hidden_size, c.initializer_range));
    torch::nn::ModuleList layers;
    const LlamaBlockOptions options{.config = c,
                                    .experts = experts_of(config),
                                    .recompute = recompute,
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
    return head_(hidden_of(tokens, loads, nullptr), HeadInput::kHidden);
  }

  at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) override {
    const at::NoGradGuard no_grad;
    std::vector<RouterLoad> loads;
    cache.layers.resize(blocks_.size());
    return head_(last_position(hidden_of(tokens, loads, &cache)), HeadInput::kHidden).squeeze(1);
  }

  ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets) override {
    std::vector<RouterLoad> loads;
    const at::Tensor hidden = hidden_of(tokens, loads, nullptr);
    const at::Tensor next = cross_entropy(head_(hidden, HeadInput::kHidden), targets);
    ModelLoss loss{next, {{"cross_entropy", next.detach()}}};
    if (!predictions_.empty()) add_predictions(tokens, targets, hidden, loads, loss);
    if (!loads.empty()) add_balance(loads, loss);
    return loss;
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

  static void note_load(const BlockOutput& output, std::vector<RouterLoad>& loads) {
    if (output.size() >= 3) loads.push_back({output[output.size() - 2], output[output.size() - 1]});
  }

  // Layer k joins position i's state with the token at i + k and predicts what follows that.
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
    const at::Tensor balance = load_balancing_loss(loads);
    loss.total = loss.total + balance * std::get<MixtralConfig>(config()).router_aux_loss_coef;
    loss.terms.push_back({"load_balance", balance.detach()});
  }

  const LlamaConfig& decoder_;
  Unit<Embedding> embedding_{nullptr};
  std::vector<Unit<LlamaBlock>> blocks_;
  std::vector<Unit<PredictionBlock>> predictions_;
  Unit<Head> head_{nullptr};
};

}  // namespace

std::shared_ptr<LanguageModel> make_llama(const ModelConfig& config, Recompute recompute) {
  return std::make_shared<Llama>(config, recompute);
}

}  // namespace fsdp::nn
