// The interface of language models that training uses, and the function that builds all of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/nn/config/lora_options.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/nn/layers/decoding_cache.h"
#include "fsdp/nn/layers/documents.h"

namespace fsdp {

class Mesh;
struct BuildOptions;

// One part of a loss, for display: detached, one element, before its weight.
struct LossTerm {
  std::string name;  // "cross_entropy", "load_balance", "dropped" or "mtp"
  at::Tensor value;
};

struct ModelLoss {
  at::Tensor total;  // for backward()
  std::vector<LossTerm> terms;
};

// A tensor that has another name in published checkpoints than in the module tree, or is stored in
// several there.
struct StoredName {
  std::string in_tree;              // how the name ends
  std::vector<std::string> stored;  // that end, for each equal part along the first dimension
};

// Embedding, layers and head are units: logits() and loss() call them, so that the model works the
// same before and after fully_shard(). Names in the module tree are those of published checkpoints,
// except stored_names(). On a mesh with a `tp` axis the ranks of a tp group give them the same
// tokens, in sequences that they can share evenly, and get the same results.
class LanguageModel : public torch::nn::Module {
 public:
  // tokens: [batch, sequence], int64. Result: [batch, sequence, vocabulary], of the weights' type.
  // With `documents`, tokens see those of their own document alone.
  virtual at::Tensor logits(const at::Tensor& tokens,
                            const std::shared_ptr<const Documents>& documents = nullptr) = 0;

  // Logits of the token after `tokens`, [batch, vocabulary]. `tokens` follow those that the cache
  // has seen: a whole text at once, or token after token. For using a trained model: no gradients,
  // and no tp axis.
  virtual at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) = 0;

  // Both [batch, sequence], int64; targets[b, i] is the token after tokens[b, i], or -100 for no
  // prediction. The mean over all other targets; 0 if there are none. With `documents`, the last
  // token of each has -100, and no later token of another document is predicted.
  virtual ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets,
                         const std::shared_ptr<const Documents>& documents = nullptr) = 0;

  // Buffers that a step of training changes besides weights: the biases by which some routers even
  // out the load of their experts. All ranks call it after optimizer steps, recorded ones included.
  void end_step(const Mesh& mesh);

  const ModelConfig& config() const { return config_; }
  // BuildOptions::lora, with the names of all layers that have an adapter in `on`.
  const LoraOptions& lora() const { return lora_; }
  const std::vector<StoredName>& stored_names() const { return stored_names_; }
  // Tensors of published checkpoints that the model does not have; globs.
  const std::vector<std::string>& ignored_names() const { return ignored_names_; }

 protected:
  LanguageModel(ModelConfig config, std::vector<StoredName> stored_names,
                std::vector<std::string> ignored_names = {})
      : config_(std::move(config)),
        stored_names_(std::move(stored_names)),
        ignored_names_(std::move(ignored_names)) {}

 private:
  friend std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                             const BuildOptions& options);

  const ModelConfig config_;
  const std::vector<StoredName> stored_names_;
  const std::vector<std::string> ignored_names_;
  LoraOptions lora_;
};

// The activations that the backward computes again instead of keeping them.
enum class Recompute : uint8_t { kNone, kBlock };

// How rows travel between the ranks that share out the experts of a layer.
enum class ExpertExchange : uint8_t {
  kAuto,   // on a GPU padded, where these ranks are one group of sums (Communicator::sum_group), as
           // those of a host are; else exact
  kExact,  // counts first, for which the host waits once per layer; then the rows alone
  // Room for all rows that could come, or for expert_capacity: nobody waits, so that a step can be
  // recorded, and all ranks must have equally many tokens.
  kPadded,
};

struct BuildOptions {
  // Initial values depend only on the seed and on the parameters' names.
  uint64_t seed = 0;
  Recompute recompute = Recompute::kNone;
  // The parameters' type. Narrow types get the rounded fp32 values.
  at::ScalarType dtype = at::ScalarType::Float;
  // On devices whose experts are shared out among ranks: room for this many times the rows that an
  // even load would send to a rank; choices beyond it count nothing, and the loss has a term
  // "dropped", their share. 0: room for all rows that could come, and none is dropped.
  double expert_capacity = 0.0;
  ExpertExchange expert_exchange = ExpertExchange::kAuto;
  // loss() has the logits of so many tokens at once as fit into this, at least of one.
  int64_t logit_bytes = kDefaultLogitBytes;
  // Adapters on frozen weights; then end_step() leaves buffers alone, too.
  LoraOptions lora = {};
};

// UsageError for a configuration that check_trainable() refuses. Under fsdp::MetaConstruction
// parameters have no memory until fully_shard() gives them the same values.
std::shared_ptr<LanguageModel> build_language_model(const ModelConfig& config,
                                                    const BuildOptions& options = {});

}  // namespace fsdp
