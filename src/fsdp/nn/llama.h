// The Llama family as a language model: dense or with experts, with or without multi-token
// prediction.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/feed_forward.h"
#include "fsdp/nn/layers/rms_norm.h"

namespace fsdp::nn {

// --- layers --------------------------------------------------------------------------------------

struct LlamaBlockOptions {
  LlamaConfig config;
  // Without experts: a dense MLP.
  ExpertsOptions experts = {};
  std::string experts_module = {};  // its name in the layer
  Recompute recompute = Recompute::kNone;
  std::shared_ptr<Rotary> rotary = nullptr;
};

// The output of this file's units: the hidden state first, and with experts the tensors of
// RouterLoad last: two, and with a capacity a third.
using BlockOutput = std::vector<at::Tensor>;

// The parts of a layer, registered in the module that owns them.
class LlamaLayerParts {
 public:
  LlamaLayerParts(torch::nn::Module& owner, const LlamaBlockOptions& options);
  BlockOutput operator()(const at::Tensor& x, LayerCache* cache);

 private:
  RmsNorm input_norm_;
  Attention attention_;
  RmsNorm mlp_norm_;
  GatedMlp mlp_{nullptr};
  Experts experts_{nullptr};
  const double capacity_factor_;
};

class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaBlockOptions& options);
  // `cache` holds the positions before x, without gradients; nullptr in training.
  BlockOutput forward(const at::Tensor& x, LayerCache* cache);

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
  // Both of equal shape. Returns the hidden state, then the same normed for the head.
  BlockOutput forward(const at::Tensor& hidden, const at::Tensor& embedded);

 private:
  BlockOutput compute(const at::Tensor& hidden, const at::Tensor& embedded);

  const Recompute recompute_;
  RmsNorm embedding_norm_;
  RmsNorm hidden_norm_;
  Projection joined_;
  LlamaLayerParts layer_;
  RmsNorm head_norm_;
};
TORCH_MODULE(PredictionBlock);

// `config` holds a trainable LlamaConfig or MixtralConfig. Leaves values unset.
std::shared_ptr<LanguageModel> make_llama(const ModelConfig& config, const BuildOptions& options);

}  // namespace fsdp::nn
