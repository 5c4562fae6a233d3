// The layers that let positions see each other: attention and recurrences.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>

#include "fsdp/nn/layers/decoding_cache.h"
#include "fsdp/nn/layers/documents.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

// The surroundings of a layer's tokens.
struct LayerContext {
  // The positions before the tokens, without gradients; nullptr in training.
  LayerCache* cache = nullptr;
  // Those of a packed batch, of all ranks' tokens.
  std::shared_ptr<const Documents> documents = nullptr;
  at::Tensor embedded = {};      // later tokens, for the first layer of a prediction
  at::Tensor token_weight = {};  // for Router

  // The parts of a recurrence; nullptr without a cache.
  at::Tensor* window() const { return cache == nullptr ? nullptr : &cache->window; }
  at::Tensor* state() const { return cache == nullptr ? nullptr : &cache->state; }
};

}  // namespace fsdp::nn

template <>
struct fsdp::TensorFields<fsdp::nn::LayerContext> {
  static constexpr bool kKnown = true;
  static constexpr bool kHasTensors = true;
  static void visit(nn::LayerContext& context, const auto& visitor) {
    visitor(context.embedded);
    visitor(context.token_weight);
  }
};

namespace fsdp::nn {

class Mixer : public torch::nn::Module, public TokenParallelLayer {
 public:
  // [batch, sequence, hidden_size], like the result: this rank's tokens. With a cache, they follow
  // the cached positions and join them; each of the documents is computed as if it were alone.
  virtual at::Tensor forward(const at::Tensor& own, const LayerContext& context = {}) = 0;
};

}  // namespace fsdp::nn
