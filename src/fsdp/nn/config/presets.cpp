#include "fsdp/nn/config/presets.h"

#include <array>

namespace fsdp {

namespace {

// 256 bytes and the end of a document.
constexpr int64_t kBytesAndEnd = 257;

// For a narrow model's matrices: with the usual 0.02 of wide models, it would learn nothing in its
// first few hundred steps.
constexpr double kNarrowRange = 0.06;

DeepseekV3Config latent_attention() {
  return {.decoder = {.vocab_size = kBytesAndEnd,
                      .hidden_size = 128,
                      .num_hidden_layers = 4,
                      .num_attention_heads = 4,
                      .num_key_value_heads = 4,
                      .head_dim = 16,
                      .intermediate_size = 384,
                      .rms_norm_eps = 1e-6,
                      .initializer_range = kNarrowRange,
                      .num_nextn_predict_layers = 1},
          .q_lora_rank = 64,
          .kv_lora_rank = 48,
          .qk_nope_head_dim = 32,
          .v_head_dim = 32,
          .first_k_dense_replace = 1,
          .n_routed_experts = 8,
          .num_experts_per_tok = 2,
          .moe_intermediate_size = 96,
          .n_group = 4,
          .topk_group = 2};
}

const std::array<ModelPreset, 8>& presets() {
  static const std::array<ModelPreset, 8> kPresets = {{
      {"tiny", "Llama on bytes, for two CPU cores",
       LlamaConfig{.vocab_size = kBytesAndEnd,
                   .hidden_size = 192,
                   .num_hidden_layers = 4,
                   .num_attention_heads = 6,
                   .num_key_value_heads = 2,
                   .intermediate_size = 512,
                   .initializer_range = kNarrowRange}},
      {"moe-tiny", "8 experts of which 2 are chosen, and a shared one, on bytes",
       MixtralConfig{.decoder = {.vocab_size = kBytesAndEnd,
                                 .hidden_size = 128,
                                 .num_hidden_layers = 4,
                                 .num_attention_heads = 4,
                                 .num_key_value_heads = 2,
                                 .intermediate_size = 192,
                                 .initializer_range = kNarrowRange},
                     .num_local_experts = 8,
                     .router_aux_loss_coef = 0.01,
                     .shared_expert_intermediate_size = 192}},
      {"hybrid-tiny", "Mamba-2, MLP and attention layers, on bytes",
       NemotronHConfig{.vocab_size = kBytesAndEnd,
                       .hidden_size = 192,
                       .intermediate_size = 512,
                       .hybrid_override_pattern = "M-M*-M-",
                       .mamba_num_heads = 12,
                       .mamba_head_dim = 32,
                       .n_groups = 2,
                       .ssm_state_size = 32,
                       .conv_kernel = 4,
                       .num_attention_heads = 6,
                       .num_key_value_heads = 2,
                       .chunk_size = 64,
                       .initializer_range = kNarrowRange}},
      {"hybrid-moe-tiny", "the same with experts, and with a second token predicted, on bytes",
       NemotronHConfig{.vocab_size = kBytesAndEnd,
                       .hidden_size = 128,
                       .intermediate_size = 384,
                       .hybrid_override_pattern = "ME*EM-",
                       .mamba_num_heads = 8,
                       .mamba_head_dim = 32,
                       .n_groups = 2,
                       .ssm_state_size = 32,
                       .conv_kernel = 4,
                       .num_attention_heads = 4,
                       .num_key_value_heads = 2,
                       .tie_word_embeddings = true,
                       .chunk_size = 64,
                       .initializer_range = kNarrowRange,
                       .n_routed_experts = 8,
                       .moe_intermediate_size = 192,
                       .moe_shared_expert_intermediate_size = 192,
                       .num_nextn_predict_layers = 1}},
      {"delta-tiny", "Gated DeltaNet and gated attention layers with experts, on bytes",
       Qwen3NextConfig{.decoder = {.vocab_size = kBytesAndEnd,
                                   .hidden_size = 128,
                                   .num_hidden_layers = 4,
                                   .num_attention_heads = 4,
                                   .num_key_value_heads = 2,
                                   .head_dim = 32,
                                   .intermediate_size = 384,
                                   .rms_norm_eps = 1e-6,
                                   .initializer_range = kNarrowRange},
                       .linear_num_key_heads = 2,
                       .linear_num_value_heads = 4,
                       .linear_key_head_dim = 32,
                       .linear_value_head_dim = 32,
                       .num_experts = 8,
                       .num_experts_per_tok = 2,
                       .moe_intermediate_size = 96,
                       .shared_expert_intermediate_size = 96,
                       .router_aux_loss_coef = 0.01}},
      {"mla-tiny", "latent attention and experts as DeepSeek-V3's, on bytes", latent_attention()},
      {"llama-110m", "Llama of 115 million parameters",
       LlamaConfig{.vocab_size = 32000,
                   .hidden_size = 512,
                   .num_hidden_layers = 24,
                   .num_attention_heads = 8,
                   .num_key_value_heads = 8,
                   .intermediate_size = 1536}},
      {"llama-1b", "Llama of 1.1 billion parameters (TinyLlama's shape)",
       LlamaConfig{.vocab_size = 32000,
                   .hidden_size = 2048,
                   .num_hidden_layers = 22,
                   .num_attention_heads = 32,
                   .num_key_value_heads = 4,
                   .intermediate_size = 5632}},
  }};
  return kPresets;
}

}  // namespace

std::span<const ModelPreset> model_presets() { return presets(); }

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const ModelPreset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

const ModelPreset* find_preset(std::string_view name) {
  for (const ModelPreset& preset : presets())
    if (preset.name == name) return &preset;
  return nullptr;
}

}  // namespace fsdp
