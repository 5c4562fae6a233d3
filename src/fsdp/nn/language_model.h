// What training asks of a language model, and the one function that builds every kind of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/nn/architecture.h"
#include "fsdp/nn/decoding_cache.h"

namespace fsdp {

// One part of a loss, for people: detached, one element, before its weight.
struct LossTerm {
  std::string name;  // "cross_entropy", "load_balance" or "mtp"
  at::Tensor value;
};

struct ModelLoss {
  at::Tensor total;  // what backward() is called on
  std::vector<LossTerm> terms;
};

// A tensor whose name in the module tree is not that of published checkpoints.
struct StoredName {
  std::string in_tree;
  std::string stored;
};

// Embedding, layers and head are units: they are called by logits() and loss(), so that the model
// works the same before and after fully_shard(). Names in the module tree are those of published
// checkpoints but for stored_names().
class LanguageModel : public torch::nn::Module {
 public:
  // tokens: [batch, sequence], int64. Result: [batch, sequence, vocabulary], of the weights' type.
  virtual at::Tensor logits(const at::Tensor& tokens) = 0;

  // Logits of what follows `tokens`, [batch, vocabulary], which in turn follow those that the cache
  // has seen: all tokens of a text at once, or one after the other. For using a trained model: no
  // gradients.
  virtual at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) = 0;

  // Both [batch, sequence], int64; targets[b, i] is what follows tokens[b, i], and -100 where
  // nothing is to be predicted. The mean over the targets there are; 0 when there are none.
  virtual ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets) = 0;

  const ModelConfig& config() const { return config_; }
  const std::vector<StoredName>& stored_names() const { return stored_names_; }

 protected:
  LanguageModel(ModelConfig config, std::vector<StoredName> stored_names)
      : config_(std::move(config)), stored_names_(std::move(stored_names)) {}

 private:
  const ModelConfig config_;
  const std::vector<StoredName> stored_names_;
};

// What of the activations is computed again in the backward instead of being kept.
enum class Recompute : uint8_t { kNone, kBlock };

struct BuildOptions {
  // Initial values depend on it and on the parameters' names alone.
  uint64_t seed = 0;
  Recompute recompute = Recompute::kNone;
  // Of the parameters. Narrow ones get the rounded fp32 values.
  at::ScalarType dtype = at::ScalarType::Float;
};

// UsageError for a configuration that check_trainable() refuses. Under fsdp::MetaConstruction
// parameters have no memory until fully_shard() gives them the same values.
std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                    const BuildOptions& options = {});

}  // namespace fsdp
