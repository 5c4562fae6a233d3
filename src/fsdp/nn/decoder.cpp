#include "fsdp/nn/decoder.h"

#include <ATen/ATen.h>

#include <optional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/shifted_batch.h"

namespace fsdp::nn {

namespace {

// Published checkpoints have a tensor for each expert and projection.
std::vector<StoredName> with_experts(std::vector<StoredName> names, const ModelConfig& config) {
  if (const std::optional<ExpertNames> experts = expert_names(config))
    for (StackedExperts& stack : stacked_experts(*experts))
      names.push_back({std::move(stack.name), std::move(stack.parts)});
  return names;
}

}  // namespace

Decoder::Decoder(const ModelConfig& config, StoredName head_norm,
                 std::vector<std::string> ignored_names, const DecoderOptions& options)
    : LanguageModel(config, with_experts({std::move(head_norm)}, config), std::move(ignored_names)),
      options_(options) {}

at::Tensor Decoder::logits(const at::Tensor& tokens,
                           const std::shared_ptr<const Documents>& documents) {
  ExpertLoads loads(options_.capacity_factor);
  return whole_logits(head_(hidden_of(tokens, documents, loads, nullptr), HeadInput::kHidden),
                      head_->ranks());
}

at::Tensor Decoder::next_logits(const at::Tensor& tokens, DecodingCache& cache) {
  check_decodes_alone(tp());
  const at::NoGradGuard no_grad;
  ExpertLoads loads(options_.capacity_factor);
  cache.layers.resize(blocks_.size());
  return head_(last_position(hidden_of(tokens, nullptr, loads, &cache)), HeadInput::kHidden)
      .squeeze(1);
}

ModelLoss Decoder::loss(const at::Tensor& tokens, const at::Tensor& targets,
                        const std::shared_ptr<const Documents>& documents) {
  ExpertLoads loads(options_.capacity_factor);
  const at::Tensor hidden = hidden_of(tokens, documents, loads, nullptr);
  const at::Tensor next = head_(hidden, HeadInput::kHidden, targets);
  ModelLoss loss{next, {{"cross_entropy", next.detach()}}};
  if (!predictors_.empty()) add_predictions(tokens, targets, documents, hidden, loads, loss);
  loads.add_to(loss, options_.balance_weight, tp());
  return loss;
}

void Decoder::join(const MeshAxis& tp) {
  check_tensor_ranks(config(), tp.size());
  TokenParallelLayer::join(tp);
}

at::Tensor Decoder::hidden_of(const at::Tensor& tokens,
                              const std::shared_ptr<const Documents>& documents, ExpertLoads& loads,
                              DecodingCache* cache) {
  at::Tensor x = embedding_(tokens);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    BlockOutput output = blocks_[i](x, cache == nullptr ? nullptr : &cache->layers[i], documents);
    loads.take(output);
    x = std::move(output[0]);
  }
  return x;
}

// Predictor k joins position i's state with the token at i + k and predicts the token after that.
void Decoder::add_predictions(const at::Tensor& tokens, const at::Tensor& targets,
                              const std::shared_ptr<const Documents>& documents, at::Tensor hidden,
                              ExpertLoads& loads, ModelLoss& loss) {
  FSDP_CHECK(tokens.size(1) > static_cast<int64_t>(predictors_.size()), "a sequence has ",
             tokens.size(1),
             " tokens; multi-token prediction needs more than num_nextn_predict_layers = ",
             predictors_.size());
  at::Tensor sum;
  int64_t offset = 0;
  for (const Predictor& predict : predictors_) {
    const ShiftedBatch later = shifted_batch(tokens, targets, ++offset, tp(), documents);
    Prediction prediction =
        predict(hidden.narrow(1, 0, later.num_own_places), embedding_(later.tokens),
                later.token_weight, later.documents, loads);
    const at::Tensor term = head_(prediction.normed, HeadInput::kNormed, later.targets);
    sum = sum.defined() ? sum + term : term;
    hidden = std::move(prediction.hidden);
  }
  const at::Tensor mean = sum / static_cast<double>(offset);
  loss.total = loss.total + mean * options_.prediction_weight;
  loss.terms.push_back({"mtp", mean.detach()});
}

}  // namespace fsdp::nn
