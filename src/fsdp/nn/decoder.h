// What all families of language models have in common: an embedding, blocks one after the other, a
// head, and layers that predict more tokens; their logits and their loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "fsdp/nn/language_model.h"
#include "fsdp/nn/layers/expert_loads.h"
#include "fsdp/nn/layers/matrix_layers.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/shard/unit.h"

namespace fsdp::nn {

struct DecoderOptions {
  double prediction_weight = 0.0;  // in the loss, of the mean of all predictions of later tokens
  double balance_weight = 0.0;     // in the loss, of load_balancing_loss()
  double capacity_factor = 0.0;    // ExpertRanks
};

// A family registers its units in its constructor and puts them here in the order of the forward.
class Decoder : public LanguageModel, public TokenParallelLayer {
 public:
  at::Tensor logits(const at::Tensor& tokens,
                    const std::shared_ptr<const Documents>& documents) override;
  at::Tensor next_logits(const at::Tensor& tokens, DecodingCache& cache) override;
  ModelLoss loss(const at::Tensor& tokens, const at::Tensor& targets,
                 const std::shared_ptr<const Documents>& documents) override;
  void join(const MeshAxis& tp) override;

 protected:
  // `cache` holds the positions before x, without gradients; nullptr in training. `documents`: of a
  // packed batch, or nullptr.
  using Block = std::function<BlockOutput(const at::Tensor& x, LayerCache* cache,
                                          const std::shared_ptr<const Documents>& documents)>;

  struct Prediction {
    at::Tensor hidden;
    at::Tensor normed;  // for the head
  };
  // From the state of places and the embeddings of later tokens. token_weight: as of Router.
  using Predictor = std::function<Prediction(
      const at::Tensor& hidden, const at::Tensor& embedded, const at::Tensor& token_weight,
      const std::shared_ptr<const Documents>& documents, ExpertLoads& loads)>;

  // `head_norm`: how published checkpoints name the norm, which is in the head here.
  Decoder(const ModelConfig& config, StoredName head_norm, std::vector<std::string> ignored_names,
          const DecoderOptions& options);

  Unit<Embedding> embedding_{nullptr};
  std::vector<Block> blocks_;
  Unit<Head> head_{nullptr};
  std::vector<Predictor> predictors_;  // each of one more token, from the state of the one before

 private:
  at::Tensor hidden_of(const at::Tensor& tokens, const std::shared_ptr<const Documents>& documents,
                       ExpertLoads& loads, DecodingCache* cache);
  void add_predictions(const at::Tensor& tokens, const at::Tensor& targets,
                       const std::shared_ptr<const Documents>& documents, at::Tensor hidden,
                       ExpertLoads& loads, ModelLoss& loss);

  const DecoderOptions options_;
};

}  // namespace fsdp::nn
