#include "fsdp/nn/deepseek_v3.h"

#include <cmath>
#include <memory>
#include <variant>

#include "fsdp/base/text.h"

namespace fsdp::nn {

namespace {

// For longer texts than those of the first training, yarn makes scores larger.
double score_scale(const DeepseekV3Config& c) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(query_head_dim_of(c)));
  const auto* yarn = std::get_if<YarnRopeScaling>(&c.decoder.rope_scaling);
  if (yarn == nullptr || yarn->mscale_all_dim == 0.0) return scale;
  const double magnitude = yarn_mscale(yarn->factor, yarn->mscale_all_dim);
  return scale * magnitude * magnitude;
}

LatentAttentionOptions latent_attention_of(const DeepseekV3Config& c) {
  return {.hidden_size = c.decoder.hidden_size,
          .num_heads = c.decoder.num_attention_heads,
          .query_rank = c.q_lora_rank,
          .key_value_rank = c.kv_lora_rank,
          .plain_size = c.qk_nope_head_dim,
          .rotary_size = head_dim_of(c.decoder),
          .value_size = c.v_head_dim,
          .bias = c.decoder.attention_bias,
          .scale = score_scale(c),
          .is_paired = c.rope_interleave,
          .standard_deviation = c.decoder.initializer_range};
}

ExpertsOptions deepseek_v3_experts(const DeepseekV3Config& c, double capacity_factor) {
  return {.router = {.hidden_size = c.decoder.hidden_size,
                     .num_experts = c.n_routed_experts,
                     .num_chosen = c.num_experts_per_tok,
                     .score = RouterScore::kSigmoid,
                     .num_groups = c.n_group,
                     .num_open_groups = c.topk_group,
                     .normalizes = c.norm_topk_prob,
                     .scale = c.routed_scaling_factor,
                     .has_bias = true,
                     .bias_rate = c.router_bias_update_rate,
                     .standard_deviation = c.decoder.initializer_range},
          .intermediate_size = c.moe_intermediate_size,
          .shared_size = c.n_shared_experts * c.moe_intermediate_size,
          .shared_module = "shared_experts",
          .capacity_factor = capacity_factor};
}

}  // namespace

std::vector<LlamaBlockOptions> deepseek_v3_blocks(const DeepseekV3Config& c,
                                                  const BuildOptions& build) {
  const LlamaBlockOptions dense{.config = c.decoder,
                                .latent_attention = latent_attention_of(c),
                                .experts_module = "mlp",
                                .recompute = build.recompute,
                                .rotary = std::make_shared<Rotary>(c.decoder)};
  LlamaBlockOptions routed = dense;
  routed.experts = deepseek_v3_experts(c, build.expert_capacity);
  std::vector<LlamaBlockOptions> blocks;
  for (int64_t layer = 0; layer <= c.decoder.num_hidden_layers; ++layer)
    blocks.push_back(has_experts(c, layer) ? routed : dense);
  return blocks;
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

}  // namespace fsdp::nn
