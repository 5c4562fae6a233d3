// Language models of every kind, small enough to train in a test.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "fsdp/nn/language_model.h"

namespace fsdp::testing {

struct SmallModel {
  std::string name;  // letters, digits and underscores
  ModelConfig config;
};

inline LlamaConfig small_llama() {
  return {.vocab_size = 37,
          .hidden_size = 24,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 8,
          .intermediate_size = 29};
}

// A position sees three.
inline LlamaConfig small_mistral() {
  LlamaConfig config = small_llama();
  config.family = LlamaFamily::kMistral;
  config.sliding_window = 3;
  return config;
}

inline LlamaConfig small_qwen2() {
  LlamaConfig config = small_llama();
  config.family = LlamaFamily::kQwen2;
  config.tie_word_embeddings = true;
  return config;
}

inline MixtralConfig small_mixtral() {
  return {.decoder = small_llama(),
          .num_local_experts = 5,
          .num_experts_per_tok = 2,
          .router_aux_loss_coef = 0.02};
}

// A small Mixtral of sizes that products in groups take on a GPU.
inline MixtralConfig aligned_mixtral() {
  MixtralConfig config = small_mixtral();
  config.decoder.hidden_size = 64;
  config.decoder.intermediate_size = 48;
  config.num_local_experts = 8;
  config.shared_expert_intermediate_size = 16;
  return config;
}

inline NemotronHConfig small_hybrid() {
  return {.vocab_size = 37,
          .hidden_size = 24,
          .intermediate_size = 29,
          .hybrid_override_pattern = "M-M*",
          .mamba_num_heads = 6,
          .mamba_head_dim = 4,
          .n_groups = 2,
          .ssm_state_size = 5,
          .conv_kernel = 4,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 8,
          .chunk_size = 4};
}

// With a router of groups and biases, a shared expert, and a second token predicted.
inline NemotronHConfig small_expert_hybrid() {
  NemotronHConfig config = small_hybrid();
  config.hybrid_override_pattern = "ME*-E";
  config.n_routed_experts = 8;
  config.num_experts_per_tok = 3;
  config.moe_intermediate_size = 13;
  config.moe_shared_expert_intermediate_size = 11;
  config.n_group = 4;
  config.topk_group = 2;
  config.routed_scaling_factor = 2.5;
  config.router_bias_update_rate = 0.01;
  config.num_nextn_predict_layers = 1;
  return config;
}

// Sizes are those of aligned_mixtral().
inline NemotronHConfig aligned_expert_hybrid() {
  NemotronHConfig config = small_expert_hybrid();
  config.hidden_size = 64;
  config.moe_intermediate_size = 48;
  config.moe_latent_size = 32;
  return config;
}

// Three DeltaNet layers and one of attention; the second layer is dense. With less than this
// epsilon, the norm behind the delta rule makes roundings of small sums large.
inline Qwen3NextConfig small_qwen3_next() {
  return {.decoder = {.vocab_size = 37,
                      .hidden_size = 24,
                      .num_hidden_layers = 4,
                      .num_attention_heads = 4,
                      .num_key_value_heads = 2,
                      .head_dim = 8,
                      .intermediate_size = 30,
                      .rms_norm_eps = 0.01},
          .linear_num_key_heads = 2,
          .linear_num_value_heads = 4,
          .linear_key_head_dim = 4,
          .linear_value_head_dim = 6,
          .num_experts = 6,
          .num_experts_per_tok = 2,
          .moe_intermediate_size = 13,
          .shared_expert_intermediate_size = 11,
          .router_aux_loss_coef = 0.02,
          .mlp_only_layers = {1}};
}

// Sizes are those of aligned_mixtral().
inline Qwen3NextConfig aligned_qwen3_next() {
  Qwen3NextConfig config = small_qwen3_next();
  config.decoder.hidden_size = 64;
  config.moe_intermediate_size = 48;
  return config;
}

// A dense layer, then one with experts; queries, keys and values of different sizes; a second token
// predicted.
inline DeepseekV3Config small_deepseek() {
  return {.decoder = {.vocab_size = 37,
                      .hidden_size = 24,
                      .num_hidden_layers = 2,
                      .num_attention_heads = 4,
                      .num_key_value_heads = 4,
                      .head_dim = 6,
                      .intermediate_size = 29,
                      .num_nextn_predict_layers = 1},
          .q_lora_rank = 10,
          .kv_lora_rank = 9,
          .qk_nope_head_dim = 5,
          .v_head_dim = 7,
          .first_k_dense_replace = 1,
          .n_routed_experts = 8,
          .n_shared_experts = 2,
          .num_experts_per_tok = 3,
          .moe_intermediate_size = 13,
          .n_group = 4,
          .topk_group = 2,
          .router_bias_update_rate = 0.01};
}

// Covers every option that changes which tensors there are, or their use.
inline std::vector<SmallModel> small_models() {
  LlamaConfig biased = small_llama();
  biased.attention_bias = biased.mlp_bias = true;
  LlamaConfig tied = small_llama();
  tied.tie_word_embeddings = true;
  LlamaConfig normed = small_llama();
  normed.qk_norm = true;
  LlamaConfig predicting = small_llama();
  predicting.num_nextn_predict_layers = 2;
  LlamaConfig tied_predicting = predicting;
  tied_predicting.tie_word_embeddings = true;
  LlamaConfig yarn = small_llama();
  yarn.rope_scaling = YarnRopeScaling{.factor = 4.0, .original_max_position_embeddings = 16};
  MixtralConfig shared = small_mixtral();
  shared.shared_expert_intermediate_size = 11;
  MixtralConfig predicting_experts = shared;
  predicting_experts.decoder.num_nextn_predict_layers = 1;
  MixtralConfig qwen_experts = small_mixtral();
  qwen_experts.decoder.qk_norm = true;
  qwen_experts.norm_topk_prob = false;
  NemotronHConfig biased_hybrid = small_hybrid();
  biased_hybrid.use_bias = biased_hybrid.attention_bias = biased_hybrid.mlp_bias = true;
  biased_hybrid.use_conv_bias = false;
  NemotronHConfig tied_hybrid = small_hybrid();
  tied_hybrid.tie_word_embeddings = true;
  NemotronHConfig latent_hybrid = small_expert_hybrid();
  latent_hybrid.tie_word_embeddings = latent_hybrid.mlp_bias = true;
  latent_hybrid.moe_latent_size = 10;
  latent_hybrid.num_nextn_predict_layers = 2;
  latent_hybrid.mtp_hybrid_override_pattern = "-*E";
  Qwen3NextConfig tied_next = small_qwen3_next();
  tied_next.decoder.tie_word_embeddings = tied_next.decoder.attention_bias = true;
  tied_next.layer_types = {LayerType::kFullAttention, LayerType::kLinearAttention};
  tied_next.decoder.num_hidden_layers = 2;
  tied_next.mlp_only_layers = {};
  tied_next.decoder_sparse_step = 2;
  tied_next.norm_topk_prob = false;
  DeepseekV3Config direct_deepseek = small_deepseek();
  direct_deepseek.q_lora_rank = 0;
  direct_deepseek.v_head_dim = 13;  // more than of a query
  direct_deepseek.n_shared_experts = 0;
  direct_deepseek.rope_interleave = direct_deepseek.norm_topk_prob = false;
  direct_deepseek.decoder.attention_bias = direct_deepseek.decoder.tie_word_embeddings = true;
  direct_deepseek.decoder.num_nextn_predict_layers = 0;
  direct_deepseek.decoder.rope_scaling = YarnRopeScaling{
      .factor = 4.0, .original_max_position_embeddings = 16, .mscale = 1.0, .mscale_all_dim = 0.5};
  return {{"llama", small_llama()},
          {"llama_biased", biased},
          {"llama_tied", tied},
          {"llama_qk_norm", normed},
          {"llama_mtp", predicting},
          {"llama_tied_mtp", tied_predicting},
          {"llama_yarn", yarn},
          {"mistral", small_mistral()},
          {"qwen2", small_qwen2()},
          {"mixtral", small_mixtral()},
          {"mixtral_shared", shared},
          {"mixtral_shared_mtp", predicting_experts},
          {"qwen3_moe", qwen_experts},
          {"hybrid", small_hybrid()},
          {"hybrid_biased", biased_hybrid},
          {"hybrid_tied", tied_hybrid},
          {"hybrid_experts", small_expert_hybrid()},
          {"hybrid_latent_experts", latent_hybrid},
          {"qwen3_next", small_qwen3_next()},
          {"qwen3_next_tied", tied_next},
          {"deepseek", small_deepseek()},
          {"deepseek_direct", direct_deepseek}};
}

// Different for every rank and step, and no random numbers. [rows, sequence + 1]
inline at::Tensor small_tokens(int rank, int step, int64_t rows = 2, int64_t sequence = 7) {
  const at::Tensor index = at::arange(rows * (sequence + 1), at::kLong);
  return (index * index * 3 + index * 5 + 11 * rank + 7 * step).remainder(37).view({rows, -1});
}

inline ModelLoss small_loss(LanguageModel& model, const at::Tensor& tokens) {
  const int64_t sequence = tokens.size(1) - 1;
  return model.loss(tokens.narrow(1, 0, sequence), tokens.narrow(1, 1, sequence));
}

// A tensor of the tree as published checkpoints have it: under its own name, under another, or in
// parts along its first dimension.
inline std::vector<std::pair<std::string, at::Tensor>> stored_tensors(const LanguageModel& model,
                                                                      const std::string& in_tree,
                                                                      const at::Tensor& value) {
  for (const StoredName& renamed : model.stored_names()) {
    if (!in_tree.ends_with(renamed.in_tree)) continue;
    const std::string prefix = in_tree.substr(0, in_tree.size() - renamed.in_tree.size());
    const int64_t num_parts = static_cast<int64_t>(renamed.stored.size());
    std::vector<std::pair<std::string, at::Tensor>> parts;
    for (int64_t i = 0; i < num_parts; ++i)
      parts.emplace_back(prefix + renamed.stored[static_cast<size_t>(i)],
                         value.chunk(num_parts)[static_cast<size_t>(i)]);
    return parts;
  }
  return {{in_tree, value}};
}

// Norms of ones would hide that they are mixed up or missing.
inline void disturb(LanguageModel& model) {
  const at::NoGradGuard no_grad;
  int64_t place = 0;
  for (at::Tensor& parameter : model.parameters())
    parameter.add_(at::sin(at::arange(parameter.numel(), at::kFloat) * 0.7 + (1.0 * place++))
                       .view(parameter.sizes()) *
                   0.1);
}

}  // namespace fsdp::testing
