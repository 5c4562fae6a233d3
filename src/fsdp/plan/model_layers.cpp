#include "fsdp/plan/model_layers.h"

#include <functional>
#include <optional>
#include <utility>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

std::string layer_name(const char* stack, int64_t layer) {
  return concat(stack, ".layers.", layer);
}

template <typename Config>
ModelLayers model_of(const Config& c, const char* embedding, const char* head_norm) {
  return {.vocab_size = c.vocab_size,
          .hidden_size = c.hidden_size,
          .is_tied = c.tie_word_embeddings,
          .embedding = embedding,
          .head_norm = head_norm,
          .blocks = {}};
}

// Layers that predict further tokens follow the main ones, as the published checkpoints number
// them.
ModelLayers decoder(const LlamaConfig& c,
                    const std::function<std::vector<BranchShape>(int64_t layer)>& branches) {
  ModelLayers model = model_of(c, "model.embed_tokens", "model.norm");
  for (int64_t layer = 0; layer < c.num_hidden_layers + c.num_nextn_predict_layers; ++layer) {
    const bool is_main = layer < c.num_hidden_layers;
    (is_main ? model.blocks : model.predictions)
        .push_back({.name = layer_name("model", layer),
                    .branches = branches(layer),
                    .joins_embedding = !is_main,
                    .head_norm = is_main ? "" : "shared_head.norm"});
  }
  return model;
}

std::vector<BranchShape> llama_branches(const char* mixer_name, Layer mixer,
                                        const std::string& second_name, Layer second) {
  return {{"input_layernorm", mixer_name, std::move(mixer)},
          {"post_attention_layernorm", second_name, std::move(second)}};
}

template <typename Config>
AttentionLayer plain_attention(const Config& c) {
  return {.num_heads = c.num_attention_heads,
          .num_kv_heads = c.num_key_value_heads,
          .head_dim = head_dim_of(c),
          .bias = c.attention_bias,
          .output_bias = c.attention_bias};
}

AttentionLayer llama_attention(const LlamaConfig& c) {
  AttentionLayer attention = plain_attention(c);
  attention.window = c.sliding_window;
  attention.bias = has_qkv_bias(c);
  attention.qk_norm = c.qk_norm;
  return attention;
}

MlpLayer mlp_of(const LlamaConfig& c) { return {.inner = c.intermediate_size, .bias = c.mlp_bias}; }

ExpertsLayer with_stacks(ExpertsLayer layer, const ModelConfig& config) {
  if (const std::optional<ExpertNames> names = expert_names(config))
    layer.stacks = stacked_experts(*names);
  return layer;
}

ModelLayers layers(const LlamaConfig& c) {
  return decoder(c, [&](int64_t) {
    return llama_branches("self_attn", llama_attention(c), "mlp", mlp_of(c));
  });
}

ModelLayers layers(const MixtralConfig& c) {
  const ExpertsLayer experts = with_stacks({.intermediate = c.decoder.intermediate_size,
                                            .experts = c.num_local_experts,
                                            .chosen = c.num_experts_per_tok,
                                            .shared = c.shared_expert_intermediate_size,
                                            .shared_name = "shared_expert"},
                                           c);
  return decoder(c.decoder, [&](int64_t) {
    return llama_branches("self_attn", llama_attention(c.decoder), experts_module(c), experts);
  });
}

ModelLayers layers(const Qwen3NextConfig& c) {
  AttentionLayer attention = plain_attention(c.decoder);
  attention.qk_norm = attention.is_gated = true;
  const ExpertsLayer experts = with_stacks({.intermediate = c.moe_intermediate_size,
                                            .experts = c.num_experts,
                                            .chosen = c.num_experts_per_tok,
                                            .shared = c.shared_expert_intermediate_size,
                                            .is_shared_gated = true,
                                            .shared_name = "shared_expert"},
                                           c);
  return decoder(c.decoder, [&](int64_t layer) {
    const bool is_linear = layer_type_of(c, layer) == LayerType::kLinearAttention;
    return llama_branches(is_linear ? "linear_attn" : "self_attn",
                          is_linear ? Layer(DeltaNetLayer{&c}) : attention, "mlp",
                          has_experts(c, layer) ? Layer(experts) : mlp_of(c.decoder));
  });
}

ModelLayers layers(const DeepseekV3Config& c) {
  const ExpertsLayer experts = with_stacks({.intermediate = c.moe_intermediate_size,
                                            .experts = c.n_routed_experts,
                                            .chosen = c.num_experts_per_tok,
                                            .shared = c.n_shared_experts * c.moe_intermediate_size,
                                            .has_sigmoid_router = true,
                                            .shared_name = "shared_experts"},
                                           c);
  return decoder(c.decoder, [&](int64_t layer) {
    return llama_branches("self_attn", LatentAttentionLayer{&c}, "mlp",
                          has_experts(c, layer) ? Layer(experts) : mlp_of(c.decoder));
  });
}

// One mixer in each block, by a pattern; further tokens have the blocks of another one.
ModelLayers layers(const NemotronHConfig& c) {
  const auto layer_of = [&](char kind) -> Layer {
    if (kind == 'M') return MambaLayer{&c};
    if (kind == '*') return plain_attention(c);
    if (kind == '-')
      return MlpLayer{.inner = c.intermediate_size, .is_gated = false, .bias = c.mlp_bias};
    return with_stacks({.intermediate = c.moe_intermediate_size,
                        .experts = c.n_routed_experts,
                        .chosen = c.num_experts_per_tok,
                        .shared = c.moe_shared_expert_intermediate_size,
                        .latent = c.moe_latent_size,
                        .is_gated = false,
                        .has_sigmoid_router = true,
                        .bias = c.mlp_bias,
                        .shared_name = "shared_experts"},
                       c);
  };
  const auto add = [&](std::vector<BlockShape>& blocks, const char* stack, char kind) {
    const auto number = static_cast<int64_t>(blocks.size());
    blocks.push_back({layer_name(stack, number), {{"norm", "mixer", layer_of(kind)}}});
  };
  ModelLayers model = model_of(c, "backbone.embeddings", "backbone.norm_f");
  for (const char kind : c.hybrid_override_pattern) add(model.blocks, "backbone", kind);
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
    const size_t first = model.predictions.size();
    for (const char kind : c.mtp_hybrid_override_pattern) add(model.predictions, "mtp", kind);
    model.predictions[first].joins_embedding = true;
    model.predictions.back().head_norm = "final_layernorm";
  }
  return model;
}

}  // namespace

ModelLayers layers_of(const ModelConfig& config) {
  return std::visit([](const auto& c) { return layers(c); }, config);
}

}  // namespace fsdp
