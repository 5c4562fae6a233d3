// Nemotron-H: Mamba-2, MLP, attention and expert layers by a pattern.
#include <memory>
#include <string>

#include "fsdp/nn/decoder.h"
#include "fsdp/nn/layers/attention.h"
#include "fsdp/nn/layers/mamba2.h"

namespace fsdp::nn {

namespace {

AttentionOptions hybrid_attention(const NemotronHConfig& c) {
  return {.hidden_size = c.hidden_size,
          .num_heads = c.num_attention_heads,
          .num_kv_heads = c.num_key_value_heads,
          .head_dim = head_dim_of(c),
          .bias = c.attention_bias,
          .output_bias = c.attention_bias,
          .standard_deviation = c.initializer_range};
}

MlpOptions hybrid_mlp(const NemotronHConfig& c) {
  return {.hidden_size = c.hidden_size,
          .intermediate_size = c.intermediate_size,
          .kind = MlpKind::kSquaredRelu,
          .bias = c.mlp_bias,
          .standard_deviation = c.initializer_range,
          .is_cut = true};
}

ExpertsOptions hybrid_experts(const NemotronHConfig& c, const BuildOptions& options) {
  return {.router = biased_router(c, c.hidden_size, c.initializer_range),
          .intermediate_size = c.moe_intermediate_size,
          .kind = MlpKind::kSquaredRelu,
          .latent_size = c.moe_latent_size,
          .shared_size = c.moe_shared_expert_intermediate_size,
          .shared_module = "shared_experts",
          .bias = c.mlp_bias,
          .capacity_factor = options.expert_capacity,
          .exchange = options.expert_exchange};
}

// One mixer behind a norm; a letter of the pattern selects it.
BlockParts hybrid_block(const NemotronHConfig& c, char kind, const BuildOptions& options) {
  Branch branch{"norm", "mixer", {}};
  if (kind == 'M')
    branch.module = std::make_shared<Mamba2Impl>(c);
  else if (kind == '*')
    branch.module = std::make_shared<AttentionImpl>(hybrid_attention(c));
  else if (kind == 'E')
    branch.module = Experts(hybrid_experts(c, options));
  else
    branch.module = Mlp(hybrid_mlp(c));
  return {.branches = {std::move(branch)}};
}

}  // namespace

DecoderParts decoder_parts(const NemotronHConfig& c, const BuildOptions& options) {
  DecoderParts parts = common_parts(c, c.layer_norm_epsilon);
  parts.body = "backbone";
  parts.embedding_name = "embeddings";
  parts.head_norm_name = "backbone.norm_f.weight";
  parts.balance_weight = c.router_aux_loss_coef;
  for (const char kind : c.hybrid_override_pattern)
    parts.blocks.push_back(hybrid_block(c, kind, options));
  // Published checkpoints have the layers of all predictions in one list, also those that a model
  // is configured without.
  parts.predictions_body = "mtp";
  if (c.num_nextn_predict_layers == 0) parts.ignored_names = {"mtp.*"};
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
    std::vector<BlockParts>& blocks = parts.predictions.emplace_back();
    for (const char kind : c.mtp_hybrid_override_pattern)
      blocks.push_back(hybrid_block(c, kind, options));
    blocks.front().joins_embedding = true;
    blocks.back().head_norm_path = {"final_layernorm"};
  }
  return parts;
}

}  // namespace fsdp::nn
