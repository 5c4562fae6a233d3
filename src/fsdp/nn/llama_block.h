// One layer of a Llama or Mixtral, as a unit's module: attention, then a gated MLP or experts.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <vector>

#include "fsdp/nn/attention.h"
#include "fsdp/nn/experts.h"
#include "fsdp/nn/gated_mlp.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/nn/rms_norm.h"

namespace fsdp::nn {

struct LlamaBlockOptions {
  LlamaConfig config;
  // num_experts = 0: a dense MLP.
  ExpertsOptions experts = {};
  Recompute recompute = Recompute::kNone;
  std::shared_ptr<Rotary> rotary = nullptr;
};

// What a unit of this file returns: the hidden state first, and with experts the two tensors of
// RouterLoad last.
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
};

class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaBlockOptions& options);
  // Without gradients `cache` may hold what came before x; null in training.
  BlockOutput forward(const at::Tensor& x, LayerCache* cache);

 private:
  const Recompute recompute_;
  LlamaLayerParts layer_;
};
TORCH_MODULE(LlamaBlock);

// A layer that predicts one token more, as DeepSeek-V3 has it: joins the hidden state of a position
// with the embedding of the token that follows it.
class PredictionBlockImpl : public torch::nn::Module {
 public:
  explicit PredictionBlockImpl(const LlamaBlockOptions& options);
  // Of equal shape. Returns the hidden state, and after it the same normed for the head.
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

}  // namespace fsdp::nn
