// Configurations that tests change in a field or two, and what such a change is answered with.
#pragma once

#include <string>

#include "fsdp/base/error.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp::testing {

inline LlamaConfig llama() {
  return {.vocab_size = 100,
          .hidden_size = 48,
          .num_hidden_layers = 3,
          .num_attention_heads = 6,
          .num_key_value_heads = 2,
          .head_dim = 8,
          .intermediate_size = 77};
}

inline NemotronHConfig hybrid() {
  return {.vocab_size = 100,
          .hidden_size = 48,
          .intermediate_size = 77,
          .hybrid_override_pattern = "M-*M",
          .mamba_num_heads = 4,
          .mamba_head_dim = 8,
          .n_groups = 2,
          .ssm_state_size = 16,
          .conv_kernel = 4,
          .num_attention_heads = 6,
          .num_key_value_heads = 2,
          .head_dim = 8};
}

inline NemotronHConfig expert_hybrid() {
  NemotronHConfig config = hybrid();
  config.hybrid_override_pattern = "ME*-";
  config.n_routed_experts = 12;
  config.moe_intermediate_size = 14;
  config.moe_shared_expert_intermediate_size = 15;
  return config;
}

// A dense layer, then two with experts.
inline DeepseekV3Config deepseek() {
  return {.decoder = {.vocab_size = 100,
                      .hidden_size = 48,
                      .num_hidden_layers = 3,
                      .num_attention_heads = 6,
                      .num_key_value_heads = 6,
                      .head_dim = 8,
                      .intermediate_size = 77},
          .q_lora_rank = 20,
          .kv_lora_rank = 16,
          .qk_nope_head_dim = 12,
          .v_head_dim = 10,
          .first_k_dense_replace = 1,
          .n_routed_experts = 8,
          .n_shared_experts = 2,
          .num_experts_per_tok = 3,
          .moe_intermediate_size = 14,
          .n_group = 4,
          .topk_group = 2};
}

// Gated DeltaNet twice, then attention.
inline Qwen3NextConfig qwen3_next() {
  return {.decoder = {.vocab_size = 100,
                      .hidden_size = 48,
                      .num_hidden_layers = 3,
                      .num_attention_heads = 6,
                      .num_key_value_heads = 2,
                      .head_dim = 8,
                      .intermediate_size = 77},
          .layer_types = {LayerType::kLinearAttention, LayerType::kLinearAttention,
                          LayerType::kFullAttention},
          .linear_num_key_heads = 2,
          .linear_num_value_heads = 4,
          .linear_key_head_dim = 8,
          .linear_value_head_dim = 12,
          .linear_conv_kernel_dim = 3,
          .num_experts = 5,
          .num_experts_per_tok = 2,
          .moe_intermediate_size = 20,
          .shared_expert_intermediate_size = 10};
}

template <typename Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace fsdp::testing
