// Llama's family: dense or with experts, with attention, latent attention or Gated DeltaNet.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/decoder.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/gated_delta_net.h"

namespace fsdp::nn {

namespace {

BlockParts llama_block(std::string mixer_name, std::shared_ptr<Mixer> mixer,
                       std::string feed_forward_name, std::variant<Mlp, Experts> feed_forward) {
  BlockParts parts;
  parts.branches.push_back({"input_layernorm", std::move(mixer_name), std::move(mixer)});
  std::visit(
      [&](auto& module) {
        parts.branches.push_back(
            {"post_attention_layernorm", std::move(feed_forward_name), std::move(module)});
      },
      feed_forward);
  return parts;
}

// `block_at` makes the block of a layer; those that predict more tokens follow the main ones.
DecoderParts llama_parts(const LlamaConfig& c,
                         const std::function<BlockParts(int64_t layer)>& block_at) {
  DecoderParts parts = common_parts(c, c.rms_norm_eps);
  parts.body = "model";
  parts.embedding_name = "embed_tokens";
  parts.head_norm_name = "model.norm.weight";
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer)
    parts.blocks.push_back(block_at(layer));
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
    BlockParts block = block_at(c.num_hidden_layers + i);
    block.joins_embedding = true;
    block.head_norm_path = {"shared_head", "norm"};
    parts.predictions.push_back({std::move(block)});
  }
  return parts;
}

AttentionOptions llama_attention(const LlamaConfig& c, std::shared_ptr<Rotary> rotary) {
  return {.hidden_size = c.hidden_size,
          .num_heads = c.num_attention_heads,
          .num_kv_heads = c.num_key_value_heads,
          .head_dim = head_dim_of(c),
          .bias = has_qkv_bias(c),
          .output_bias = c.attention_bias,
          .scores = {.window = c.sliding_window},
          .qk_norm_eps = c.qk_norm ? c.rms_norm_eps : 0.0,
          .standard_deviation = c.initializer_range,
          .rotary = std::move(rotary)};
}

Mlp mlp_of(const LlamaConfig& c) {
  return Mlp(MlpOptions{c.hidden_size, c.intermediate_size, MlpKind::kGatedSilu, c.mlp_bias,
                        c.initializer_range, /*is_cut=*/true});
}

// Mixtral's and Qwen's.
template <typename Config>
RouterOptions softmax_router(const Config& c, int64_t num_experts) {
  return {.hidden_size = c.decoder.hidden_size,
          .num_experts = num_experts,
          .num_chosen = c.num_experts_per_tok,
          .normalizes = c.norm_topk_prob,
          .standard_deviation = c.decoder.initializer_range};
}

std::vector<std::string> deepseek_v3_ignored_names(const DeepseekV3Config& c) {
  const int64_t first = c.decoder.num_hidden_layers;
  if (c.decoder.num_nextn_predict_layers == 0) return {concat("model.layers.", first, ".*")};
  // Copies of the main model's embedding and head.
  std::vector<std::string> names;
  for (int64_t i = 0; i < c.decoder.num_nextn_predict_layers; ++i)
    for (const char* copy : {"embed_tokens.weight", "shared_head.head.weight"})
      names.push_back(concat("model.layers.", first + i, ".", copy));
  return names;
}

}  // namespace

DecoderParts decoder_parts(const LlamaConfig& c, const BuildOptions&) {
  const AttentionOptions attention = llama_attention(c, std::make_shared<Rotary>(c));
  return llama_parts(c, [&](int64_t) {
    return llama_block("self_attn", std::make_shared<AttentionImpl>(attention), "mlp", mlp_of(c));
  });
}

DecoderParts decoder_parts(const MixtralConfig& c, const BuildOptions& options) {
  const AttentionOptions attention =
      llama_attention(c.decoder, std::make_shared<Rotary>(c.decoder));
  const ExpertsOptions experts{.router = softmax_router(c, c.num_local_experts),
                               .intermediate_size = c.decoder.intermediate_size,
                               .shared_size = c.shared_expert_intermediate_size,
                               .capacity_factor = options.expert_capacity,
                               .exchange = options.expert_exchange};
  DecoderParts parts = llama_parts(c.decoder, [&](int64_t) {
    return llama_block("self_attn", std::make_shared<AttentionImpl>(attention), experts_module(c),
                       Experts(experts));
  });
  parts.balance_weight = c.router_aux_loss_coef;
  return parts;
}

DecoderParts decoder_parts(const Qwen3NextConfig& c, const BuildOptions& options) {
  AttentionOptions attention =
      llama_attention(c.decoder, std::make_shared<Rotary>(c.decoder, rotary_dim_of(c)));
  attention.qk_norm_eps = c.decoder.rms_norm_eps;
  attention.qk_norm_weight = NormWeight::kZeroCentred;
  attention.is_gated = true;
  const GatedDeltaNetOptions delta_net{.hidden_size = c.decoder.hidden_size,
                                       .num_key_heads = c.linear_num_key_heads,
                                       .num_value_heads = c.linear_num_value_heads,
                                       .key_head_dim = c.linear_key_head_dim,
                                       .value_head_dim = c.linear_value_head_dim,
                                       .conv_kernel = c.linear_conv_kernel_dim,
                                       .norm_eps = c.decoder.rms_norm_eps,
                                       .standard_deviation = c.decoder.initializer_range};
  const ExpertsOptions experts{.router = softmax_router(c, c.num_experts),
                               .intermediate_size = c.moe_intermediate_size,
                               .shared_size = c.shared_expert_intermediate_size,
                               .is_shared_gated = true,
                               .capacity_factor = options.expert_capacity,
                               .exchange = options.expert_exchange};
  DecoderParts parts = llama_parts(c.decoder, [&](int64_t layer) {
    const bool is_linear = layer_type_of(c, layer) == LayerType::kLinearAttention;
    std::shared_ptr<Mixer> mixer;
    if (is_linear)
      mixer = std::make_shared<GatedDeltaNetImpl>(delta_net);
    else
      mixer = std::make_shared<AttentionImpl>(attention);
    const char* name = is_linear ? "linear_attn" : "self_attn";
    if (has_experts(c, layer)) return llama_block(name, mixer, "mlp", Experts(experts));
    return llama_block(name, mixer, "mlp", mlp_of(c.decoder));
  });
  parts.norm_weight = NormWeight::kZeroCentred;
  parts.balance_weight = c.router_aux_loss_coef;
  parts.ignored_names = {
      "mtp.*"};  // layers of multi-token prediction; `transformers` has none, too
  return parts;
}

DecoderParts decoder_parts(const DeepseekV3Config& c, const BuildOptions& options) {
  const auto rotary = std::make_shared<Rotary>(c.decoder);
  const ExpertsOptions experts{
      .router = biased_router(c, c.decoder.hidden_size, c.decoder.initializer_range),
      .intermediate_size = c.moe_intermediate_size,
      .shared_size = c.n_shared_experts * c.moe_intermediate_size,
      .shared_module = "shared_experts",
      .capacity_factor = options.expert_capacity,
      .exchange = options.expert_exchange};
  DecoderParts parts = llama_parts(c.decoder, [&](int64_t layer) {
    const auto mixer = std::make_shared<LatentAttentionImpl>(c, rotary);
    if (has_experts(c, layer)) return llama_block("self_attn", mixer, "mlp", Experts(experts));
    return llama_block("self_attn", mixer, "mlp", mlp_of(c.decoder));
  });
  parts.balance_weight = c.router_aux_loss_coef;
  parts.ignored_names = deepseek_v3_ignored_names(c);
  return parts;
}

}  // namespace fsdp::nn
