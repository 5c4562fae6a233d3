// Which tensors a model of a known architecture has, from the numbers of its configuration.
//
// Fields are named after the keys of the configurations published with the models, tensors after
// the published checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

// Multi-head latent attention; a few dense layers, then routed and shared experts; multi-token
// prediction (MTP) modules that use the embedding and the head of the main model once more.
struct DeepseekV3Config {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;  // 0: queries are projected in one step
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  int64_t intermediate_size = 0;
  int64_t moe_intermediate_size = 0;
  int64_t n_routed_experts = 0;
  int64_t n_shared_experts = 0;
  int64_t first_k_dense_replace = 0;
  int64_t num_nextn_predict_layers = 0;
  bool attention_bias = false;
  bool tie_word_embeddings = false;
};

// What can be planned: all that can be trained, and more.
using PlannableConfig = std::variant<ModelConfig, DeepseekV3Config>;

// Throws UsageError with the field, its value and what it must be.
ModelShape build_model(std::string name, const PlannableConfig& config);

}  // namespace fsdp
