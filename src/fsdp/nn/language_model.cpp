#include "fsdp/nn/language_model.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>

#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/decoder.h"
#include "fsdp/nn/kernels/layer_kernels.h"
#include "fsdp/nn/layers/adapters.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/named_init.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/shard/recompute.h"

namespace fsdp::nn {

namespace {

// --- what a layer of multi-token prediction sees of a batch --------------------------------------

// Place i has the token and the target of place i + offset.
//
// Without ranks (tp is nullptr) the last `offset` places, which have no later token, are left out.
// The ranks of a tp group can share only the whole sequence evenly, so for them those places stay:
// with some token, without a target, and without weight in the load of experts. Attention is
// causal, so no other place sees them.
struct ShiftedBatch {
  at::Tensor tokens;        // [batch, places]
  at::Tensor targets;       // the same
  at::Tensor token_weight;  // [this rank's tokens], for Router; undefined: all places count
  int64_t num_own_places = 0;
  std::shared_ptr<const Documents> documents = nullptr;  // of `tokens`
};

// So that means over all places of all ranks are means over the first `length` of each sequence.
at::Tensor weight_of_own_places(const at::Tensor& tokens, int64_t length, const MeshAxis* tp) {
  const int64_t sequence = tokens.size(1);
  const at::Tensor weight = at::zeros(tokens.sizes(), tokens.options().dtype(at::kFloat));
  weight.narrow(1, 0, length).fill_(static_cast<double>(sequence) / static_cast<double>(length));
  return own_sequence(weight, tp).reshape({-1});
}

ShiftedBatch shifted(const at::Tensor& tokens, const at::Tensor& targets, int64_t offset,
                     const MeshAxis* tp) {
  const int64_t length = tokens.size(1) - offset;
  if (tp == nullptr)
    return {.tokens = tokens.narrow(1, offset, length),
            .targets = targets.narrow(1, offset, length),
            .token_weight = {},
            .num_own_places = length};
  ShiftedBatch shifted{.tokens = tokens.roll(-offset, 1),
                       .targets = targets.roll(-offset, 1),
                       .token_weight = weight_of_own_places(tokens, length, tp),
                       .num_own_places = tokens.size(1) / tp->size()};
  shifted.targets.narrow(1, length, offset).fill_(kNoTarget);
  return shifted;
}

// A place whose later token is of another of the documents has no target.
ShiftedBatch shifted_batch(const at::Tensor& tokens, const at::Tensor& targets, int64_t offset,
                           const MeshAxis* tp, const std::shared_ptr<const Documents>& documents) {
  ShiftedBatch batch = shifted(tokens, targets, offset, tp);
  if (!documents) return batch;
  const int64_t num_places = batch.tokens.size(1);
  batch.documents = num_places == tokens.size(1)
                        ? documents
                        : std::make_shared<const Documents>(documents->cut(num_places));
  // In another document counting began anew in between, so its positions are less.
  const at::Tensor& positions = documents->positions();
  const at::Tensor later = positions.roll(-offset, 1).narrow(1, 0, num_places);
  const at::Tensor is_other = later.ne(positions.narrow(1, 0, num_places) + offset);
  batch.targets = batch.targets.masked_fill(is_other, kNoTarget);
  return batch;
}

// --- names ---------------------------------------------------------------------------------------

// Published checkpoints have a tensor for each expert and projection.
std::vector<StoredName> with_experts(std::vector<StoredName> names, const ModelConfig& config) {
  if (const std::optional<ExpertNames> experts = expert_names(config))
    for (StackedExperts& stack : stacked_experts(*experts))
      names.push_back({std::move(stack.name), std::move(stack.parts)});
  return names;
}

}  // namespace

// --- blocks --------------------------------------------------------------------------------------

BlockImpl::BlockImpl(const BlockParts& parts, const DecoderParts& model,
                     const BuildOptions& options)
    : recompute_(options.recompute), expert_capacity_(options.expert_capacity) {
  const auto norm = [&] { return RmsNorm(model.hidden_size, model.norm_eps, model.norm_weight); };
  if (parts.joins_embedding) {
    embedding_norm_ = register_module("enorm", norm());
    hidden_norm_ = register_module("hnorm", norm());
    joined_ = register_module(
        "eh_proj", Projection(ProjectionOptions{.in = 2 * model.hidden_size,
                                                .out = model.hidden_size,
                                                .standard_deviation = model.standard_deviation}));
  }
  for (const Branch& branch : parts.branches) {
    branches_.push_back({register_module(branch.norm_name, norm()), branch.module});
    std::visit([&](const auto& module) { register_module(branch.name, module); }, branch.module);
  }
  torch::nn::Module* owner = this;
  for (size_t i = 0; i < parts.head_norm_path.size(); ++i) {
    if (i + 1 == parts.head_norm_path.size())
      head_norm_ = owner->register_module(parts.head_norm_path[i], norm());
    else
      owner = owner->register_module(parts.head_norm_path[i], std::make_shared<torch::nn::Module>())
                  .get();
  }
}

// A block recomputes itself inside the unit, so that its weights are gathered ahead of the backward
// as usual.
BlockOutput BlockImpl::forward(const at::Tensor& x, const LayerContext& context) {
  if (recompute_ == Recompute::kNone || context.cache != nullptr) return compute(x, context);
  std::vector<at::Tensor> differentiable = {x};
  if (context.embedded.defined()) differentiable.push_back(context.embedded);
  return recompute(
      [this, context](const std::vector<at::Tensor>& inputs) {
        LayerContext again = context;
        if (inputs.size() > 1) again.embedded = inputs[1];
        return compute(inputs[0], again);
      },
      differentiable);
}

BlockOutput BlockImpl::compute(const at::Tensor& x, const LayerContext& context) {
  at::Tensor around = x;
  if (!joined_.is_empty())
    around = joined_(at::cat({embedding_norm_(context.embedded), hidden_norm_(x)}, -1));
  at::Tensor added;
  BlockOutput loads;
  for (NormedModule& branch : branches_) {
    // `added` is freed before the module computes.
    NormedBranch normed = branch.norm->branch(around, std::exchange(added, {}));
    around = std::move(normed.around);
    added = apply(branch, normed.normed, context, loads);
  }
  BlockOutput output = {around + added};
  if (!head_norm_.is_empty()) output.push_back(head_norm_(output[0]));
  output.insert(output.end(), loads.begin(), loads.end());
  return output;
}

at::Tensor BlockImpl::apply(NormedModule& branch, const at::Tensor& x, const LayerContext& context,
                            BlockOutput& loads) const {
  if (const auto* mixer = std::get_if<std::shared_ptr<Mixer>>(&branch.module))
    return (*mixer)->forward(x, context);
  if (auto* mlp = std::get_if<Mlp>(&branch.module)) return (*mlp)(x);
  RoutedTokens routed = std::get<Experts>(branch.module)(x, context.token_weight);
  append_load(std::move(routed.load), expert_capacity_, loads);
  return routed.output;
}

// --- the model -----------------------------------------------------------------------------------

Decoder::Decoder(const ModelConfig& config, const DecoderParts& parts, const BuildOptions& options)
    : LanguageModel(config, with_experts({{"lm_head.norm.weight", {parts.head_norm_name}}}, config),
                    parts.ignored_names),
      expert_capacity_(options.expert_capacity),
      prediction_weight_(parts.prediction_weight),
      balance_weight_(parts.balance_weight) {
  auto body = register_module(parts.body, std::make_shared<torch::nn::Module>());
  embedding_ = body->register_module(
      parts.embedding_name,
      Unit<Embedding>(parts.vocab_size, parts.hidden_size, parts.standard_deviation));
  torch::nn::ModuleList main;
  const bool are_beside = parts.predictions_body.empty();
  torch::nn::ModuleList further = are_beside ? main : torch::nn::ModuleList();
  const auto add = [&](torch::nn::ModuleList& to, const BlockParts& block) {
    Unit<Block> unit(block, parts, options);
    to->push_back(unit);
    return unit;
  };
  for (const BlockParts& block : parts.blocks) blocks_.push_back(add(main, block));
  for (const std::vector<BlockParts>& prediction : parts.predictions) {
    std::vector<Unit<Block>>& units = predictions_.emplace_back();
    for (const BlockParts& block : prediction) units.push_back(add(further, block));
  }
  body->register_module("layers", main);
  head_ = register_module(
      "lm_head",
      Unit<Head>(HeadOptions{.vocab_size = parts.vocab_size,
                             .hidden_size = parts.hidden_size,
                             .norm_eps = parts.norm_eps,
                             .norm_weight = parts.norm_weight,
                             .standard_deviation = parts.standard_deviation,
                             .tied_weight = parts.is_tied ? embedding_->weight : at::Tensor(),
                             .logit_bytes = options.logit_bytes}));
  if (!are_beside && !predictions_.empty())
    register_module(parts.predictions_body, std::make_shared<torch::nn::Module>())
        ->register_module("layers", further);
}

at::Tensor Decoder::logits(const at::Tensor& tokens,
                           const std::shared_ptr<const Documents>& documents) {
  ExpertLoads loads(expert_capacity_);
  return whole_logits(head_(hidden_of(tokens, documents, loads, nullptr), HeadInput::kHidden),
                      head_->ranks());
}

at::Tensor Decoder::next_logits(const at::Tensor& tokens, DecodingCache& cache) {
  if (tp() != nullptr)
    throw UsageError(
        concat("tp = ", tp()->size(),
               " ranks share the tokens of a sequence, so they cannot decode one after the other; "
               "load the checkpoint on a mesh without tp"));
  const at::NoGradGuard no_grad;
  ExpertLoads loads(expert_capacity_);
  cache.layers.resize(blocks_.size());
  const at::Tensor hidden = hidden_of(tokens, nullptr, loads, &cache);
  return head_(hidden.narrow(1, hidden.size(1) - 1, 1), HeadInput::kHidden).squeeze(1);
}

ModelLoss Decoder::loss(const at::Tensor& tokens, const at::Tensor& targets,
                        const std::shared_ptr<const Documents>& documents) {
  ExpertLoads loads(expert_capacity_);
  const at::Tensor hidden = hidden_of(tokens, documents, loads, nullptr);
  const at::Tensor next = head_(hidden, HeadInput::kHidden, targets);
  ModelLoss loss{next, {{"cross_entropy", next.detach()}}};
  if (!predictions_.empty()) add_predictions(tokens, targets, documents, hidden, loads, loss);
  loads.add_to(loss, balance_weight_, tp());
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
    BlockOutput output =
        blocks_[i](x, LayerContext{.cache = cache == nullptr ? nullptr : &cache->layers[i],
                                   .documents = documents});
    loads.take(output);
    x = std::move(output[0]);
  }
  return x;
}

// Predictor k joins position i's state with the token at i + k and predicts the token after that.
void Decoder::add_predictions(const at::Tensor& tokens, const at::Tensor& targets,
                              const std::shared_ptr<const Documents>& documents, at::Tensor hidden,
                              ExpertLoads& loads, ModelLoss& loss) {
  FSDP_CHECK(tokens.size(1) > static_cast<int64_t>(predictions_.size()), "a sequence has ",
             tokens.size(1),
             " tokens; multi-token prediction needs more than num_nextn_predict_layers = ",
             predictions_.size());
  at::Tensor sum;
  int64_t offset = 0;
  for (std::vector<Unit<Block>>& blocks : predictions_) {
    const ShiftedBatch later = shifted_batch(tokens, targets, ++offset, tp(), documents);
    LayerContext context{.documents = later.documents,
                         .embedded = embedding_(later.tokens),
                         .token_weight = later.token_weight};
    BlockOutput output = {hidden.narrow(1, 0, later.num_own_places)};
    for (Unit<Block>& block : blocks) {
      output = block(output[0], context);
      context.embedded = at::Tensor();
      loads.take(output);
    }
    const at::Tensor term = head_(output[1], HeadInput::kNormed, later.targets);
    sum = sum.defined() ? sum + term : term;
    hidden = std::move(output[0]);
  }
  const at::Tensor mean = sum / static_cast<double>(offset);
  loss.total = loss.total + mean * prediction_weight_;
  loss.terms.push_back({"mtp", mean.detach()});
}

}  // namespace fsdp::nn

namespace fsdp {

std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                    const BuildOptions& options) {
  check_trainable(config);
  const nn::DecoderParts parts =
      std::visit([&](const auto& each) { return nn::decoder_parts(each, options); }, config);
  std::shared_ptr<LanguageModel> model = std::make_shared<nn::Decoder>(config, parts, options);
  model->lora_ = nn::add_adapters(*model, options.lora);
  nn::initialize_by_name(*model, options.seed);
  // Buffers stay as they are: a router's biases change by less than a narrow type could tell.
  if (options.dtype != at::kFloat)
    for (at::Tensor& parameter : model->parameters())
      parameter.set_data(parameter.to(options.dtype));
  return model;
}

void LanguageModel::end_step(const Mesh& mesh) {
  if (!lora_.is_on()) nn::even_out_loads(*this, mesh);
}

}  // namespace fsdp
