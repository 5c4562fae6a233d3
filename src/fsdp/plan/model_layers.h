// The layers of a model in the words of planning, whatever its architecture is called: its tensors,
// operations and activations all follow from these.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "fsdp/nn/config/model_config.h"

namespace fsdp {

struct AttentionLayer {
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t window = 0;  // each position sees so many; 0: all before it
  bool bias = false;   // of queries, keys and values
  bool output_bias = false;
  bool qk_norm = false;
  bool is_gated = false;  // each query has a gate beside it

  int64_t queries() const { return num_heads * head_dim; }
  int64_t keys() const { return num_kv_heads * head_dim; }
};

// The configurations of mixers that one family has alone; they outlive the layers.
struct LatentAttentionLayer {
  const DeepseekV3Config* config;
};
struct MambaLayer {
  const NemotronHConfig* config;
};
struct DeltaNetLayer {
  const Qwen3NextConfig* config;
};

// Two matrices and their product behind a gate, or one and the square of a ReLU; then one back.
struct MlpLayer {
  int64_t inner;
  bool is_gated = true;
  bool bias = false;
};

struct ExpertsLayer {
  int64_t intermediate;
  int64_t experts, chosen;
  int64_t shared = 0;  // the width of the expert that all tokens pass; 0: none
  int64_t latent = 0;  // of tokens on their way to the experts; 0: as they are
  bool is_gated = true;
  bool is_shared_gated = false;
  bool has_sigmoid_router = false;  // with a bias for each expert, which evens out the load
  bool bias = false;                // of the projections around experts, and of the shared one
  std::string shared_name = {};     // "shared_expert"
  std::array<StackedExperts, 2> stacks = {};

  MlpLayer shared_mlp() const { return {.inner = shared, .is_gated = is_gated, .bias = bias}; }
};

using Layer = std::variant<AttentionLayer, LatentAttentionLayer, MambaLayer, DeltaNetLayer,
                           MlpLayer, ExpertsLayer>;

// x + layer(norm(x)), with the names of published checkpoints.
struct BranchShape {
  std::string norm;
  std::string name;
  Layer layer;
};

struct BlockShape {
  std::string name;  // of its unit
  std::vector<BranchShape> branches;
  // The first block of a prediction joins the hidden state with the embedding of a later token; the
  // last one has a norm for the head, of this name.
  bool joins_embedding = false;
  std::string head_norm = {};
};

struct ModelLayers {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  bool is_tied = false;
  std::string embedding;  // names
  std::string head_norm;
  std::vector<BlockShape> blocks;
  std::vector<BlockShape> predictions = {};  // of further tokens, one after the other

  // Units are the embedding, the blocks, the head, and the blocks of predictions.
  size_t head_unit() const { return blocks.size() + 1; }
  const BlockShape& block_of_unit(size_t unit) const {
    return unit < head_unit() ? blocks[unit - 1] : predictions[unit - head_unit() - 1];
  }
};

// They refer to the configuration.
ModelLayers layers_of(const ModelConfig& config);

}  // namespace fsdp
