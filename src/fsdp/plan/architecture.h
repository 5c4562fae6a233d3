// Which tensors a model of a known architecture has, from the numbers of its configuration.
//
// Fields are named after the keys of the configurations published with the models, tensors after
// the published checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "fsdp/plan/model_shape.h"

namespace fsdp {

// Attention with grouped keys and values, then a gated MLP (Llama 1 to 3 and their kin).
struct LlamaConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  int64_t intermediate_size = 0;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
};

// Llama's attention; the MLP is a router and several gated experts.
struct MixtralConfig {
  LlamaConfig decoder;
  int64_t num_local_experts = 0;
};

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

// One mixer per layer, chosen by a pattern: M = Mamba-2, - = MLP, * = attention.
struct NemotronHConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  std::string hybrid_override_pattern;
  int64_t mamba_num_heads = 0;
  int64_t mamba_head_dim = 0;
  int64_t n_groups = 0;
  int64_t ssm_state_size = 0;
  int64_t conv_kernel = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  bool use_conv_bias = true;
  bool use_bias = false;  // of the Mamba projections
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
};

using ModelConfig = std::variant<LlamaConfig, MixtralConfig, DeepseekV3Config, NemotronHConfig>;

// Throws UsageError with the field, its value and what it must be.
ModelShape build_model(std::string name, const ModelConfig& config);

}  // namespace fsdp
