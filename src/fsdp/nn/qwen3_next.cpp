#include "fsdp/nn/qwen3_next.h"

#include <memory>

namespace fsdp::nn {

namespace {

GatedDeltaNetOptions delta_net_of(const Qwen3NextConfig& c) {
  return {.hidden_size = c.decoder.hidden_size,
          .num_key_heads = c.linear_num_key_heads,
          .num_value_heads = c.linear_num_value_heads,
          .key_head_dim = c.linear_key_head_dim,
          .value_head_dim = c.linear_value_head_dim,
          .conv_kernel = c.linear_conv_kernel_dim,
          .norm_eps = c.decoder.rms_norm_eps,
          .standard_deviation = c.decoder.initializer_range};
}

ExpertsOptions qwen3_next_experts(const Qwen3NextConfig& c, double capacity_factor) {
  return {.router = {.hidden_size = c.decoder.hidden_size,
                     .num_experts = c.num_experts,
                     .num_chosen = c.num_experts_per_tok,
                     .normalizes = c.norm_topk_prob,
                     .standard_deviation = c.decoder.initializer_range},
          .intermediate_size = c.moe_intermediate_size,
          .shared_size = c.shared_expert_intermediate_size,
          .is_shared_gated = true,
          .capacity_factor = capacity_factor};
}

}  // namespace

std::vector<LlamaBlockOptions> qwen3_next_blocks(const Qwen3NextConfig& c,
                                                 const BuildOptions& build) {
  LlamaBlockOptions common{.config = c.decoder,
                           .norm_weight = NormWeight::kZeroCentred,
                           .is_attention_gated = true,
                           .experts_module = "mlp",
                           .recompute = build.recompute,
                           .rotary = std::make_shared<Rotary>(c.decoder, rotary_dim_of(c))};
  common.config.qk_norm = true;
  std::vector<LlamaBlockOptions> blocks;
  for (int64_t layer = 0; layer < c.decoder.num_hidden_layers; ++layer) {
    LlamaBlockOptions& block = blocks.emplace_back(common);
    if (layer_type_of(c, layer) == LayerType::kLinearAttention) block.delta_net = delta_net_of(c);
    if (has_experts(c, layer)) block.experts = qwen3_next_experts(c, build.expert_capacity);
  }
  return blocks;
}

}  // namespace fsdp::nn
