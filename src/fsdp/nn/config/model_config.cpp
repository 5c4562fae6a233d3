#include "fsdp/nn/config/model_config.h"

#include <algorithm>
#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/base/utf8.h"

namespace fsdp {

namespace {

enum class Above { kZero, kZeroOrEqual };

void check_number(const char* field, double value, Above limit) {
  const bool fits = std::isfinite(value) && (limit == Above::kZero ? value > 0.0 : value >= 0.0);
  if (!fits)
    throw UsageError(concat(field, " is ", value, "; it must be a number ",
                            limit == Above::kZero ? "above 0" : "from 0 up", ", and not infinite"));
}

void check_positions(int64_t max_position_embeddings) {
  check_range(1, int64_t{1} << 31, {{"max_position_embeddings", max_position_embeddings}});
}

void check_computed(const std::string& not_computed) {
  if (!not_computed.empty()) throw UsageError(not_computed);
}

void check_pattern(const char* field, const std::string& pattern) {
  if (pattern.empty())
    throw UsageError(concat(field, " is empty; it needs one of M, -, * and E per layer"));
  const auto num_layers = static_cast<int64_t>(pattern.size());
  if (num_layers > kMaxLayers)
    throw UsageError(
        concat(field, " has ", num_layers, " layers; at most ", kMaxLayers, " are supported"));
  constexpr std::string_view kKnown = "M-*E";
  for (const char layer : pattern)
    if (kKnown.find(layer) == std::string_view::npos)
      throw UsageError(concat(field, " contains '", shown({&layer, 1}),
                              "'; the known layers are M (Mamba-2), - (MLP), * (attention) and "
                              "E (experts)"));
}

void check_scaling(const std::monostate&) {}

void check_scaling(const Llama3RopeScaling& scaling) {
  check_number("rope_scaling.factor", scaling.factor, Above::kZero);
  check_number("rope_scaling.low_freq_factor", scaling.low_freq_factor, Above::kZero);
  check_number("rope_scaling.high_freq_factor", scaling.high_freq_factor, Above::kZero);
  check_dims({{"rope_scaling.original_max_position_embeddings",
               scaling.original_max_position_embeddings}});
  if (scaling.high_freq_factor <= scaling.low_freq_factor)
    throw UsageError(concat("rope_scaling.high_freq_factor is ", scaling.high_freq_factor,
                            "; it must be above low_freq_factor = ", scaling.low_freq_factor));
}

void check_scaling(const YarnRopeScaling& scaling) {
  check_number("rope_scaling.factor", scaling.factor, Above::kZero);
  check_number("rope_scaling.beta_fast", scaling.beta_fast, Above::kZero);
  check_number("rope_scaling.beta_slow", scaling.beta_slow, Above::kZero);
  check_number("rope_scaling.mscale", scaling.mscale, Above::kZeroOrEqual);
  check_number("rope_scaling.mscale_all_dim", scaling.mscale_all_dim, Above::kZeroOrEqual);
  check_number("rope_scaling.attention_factor", scaling.attention_factor, Above::kZeroOrEqual);
  check_dims({{"rope_scaling.original_max_position_embeddings",
               scaling.original_max_position_embeddings}});
}

void check_rope(const LlamaConfig& c) {
  check_number("rope_theta", c.rope_theta, Above::kZero);
  if (head_dim_of(c) % 2 != 0)
    throw UsageError(concat("head_dim is ", head_dim_of(c),
                            "; rotary positions need an even one, so set head_dim"));
  std::visit([](const auto& scaling) { check_scaling(scaling); }, c.rope_scaling);
}

void check_computable(const LlamaConfig& c) {
  validate(c);
  check_computed(c.not_computed);
  check_rope(c);
  check_positions(c.max_position_embeddings);
  check_number("rms_norm_eps", c.rms_norm_eps, Above::kZero);
  check_number("initializer_range", c.initializer_range, Above::kZeroOrEqual);
  check_number("mtp_loss_weight", c.mtp_loss_weight, Above::kZeroOrEqual);
}

void check_computable(const MixtralConfig& c) {
  validate(c);
  check_computable(c.decoder);
  check_range(1, c.num_local_experts, {{"num_experts_per_tok", c.num_experts_per_tok}});
  check_number("router_aux_loss_coef", c.router_aux_loss_coef, Above::kZeroOrEqual);
}

template <typename Config>
void check_router(const Config& c) {
  check_range(1, c.n_routed_experts, {{"n_group", c.n_group}});
  check_range(1, c.n_group, {{"topk_group", c.topk_group}});
  if (c.n_routed_experts % c.n_group != 0)
    throw UsageError(concat("n_group is ", c.n_group,
                            "; it must divide n_routed_experts = ", c.n_routed_experts));
  check_range(1, c.n_routed_experts / c.n_group * c.topk_group,
              {{"num_experts_per_tok", c.num_experts_per_tok}});
  check_number("routed_scaling_factor", c.routed_scaling_factor, Above::kZero);
  check_number("router_bias_update_rate", c.router_bias_update_rate, Above::kZeroOrEqual);
  check_number("router_aux_loss_coef", c.router_aux_loss_coef, Above::kZeroOrEqual);
}

void check_computable(const NemotronHConfig& c) {
  validate(c);
  check_computed(c.not_computed);
  check_positions(c.max_position_embeddings);
  check_number("layer_norm_epsilon", c.layer_norm_epsilon, Above::kZero);
  check_number("initializer_range", c.initializer_range, Above::kZeroOrEqual);
  check_number("time_step_min", c.time_step_min, Above::kZeroOrEqual);
  check_number("mtp_loss_weight", c.mtp_loss_weight, Above::kZeroOrEqual);
  check_dims({{"chunk_size", c.chunk_size}});
  if (c.mamba_num_heads % c.n_groups != 0)
    throw UsageError(concat("n_groups is ", c.n_groups,
                            "; it must divide mamba_num_heads = ", c.mamba_num_heads));
  if (c.num_nextn_predict_layers > 0 &&
      c.mtp_hybrid_override_pattern.find('M') != std::string::npos)
    throw UsageError(
        "mtp_hybrid_override_pattern contains 'M'; layers that predict more tokens are computed "
        "with -, * and E");
  if (has_layer(c, 'E')) check_router(c);
}

void check_computable(const Qwen3NextConfig& c) {
  validate(c);
  check_computable(c.decoder);
  check_range(1, c.num_experts, {{"num_experts_per_tok", c.num_experts_per_tok}});
  check_number("router_aux_loss_coef", c.router_aux_loss_coef, Above::kZeroOrEqual);
  if (!(c.partial_rotary_factor > 0.0 && c.partial_rotary_factor <= 1.0) || rotary_dim_of(c) < 2 ||
      rotary_dim_of(c) % 2 != 0)
    throw UsageError(concat("partial_rotary_factor is ", c.partial_rotary_factor,
                            "; times head_dim = ", head_dim_of(c.decoder),
                            " it must be an even number from 2 to head_dim"));
}

void check_computable(const DeepseekV3Config& c) {
  validate(c);
  check_computable(c.decoder);
  check_router(c);
}

const LlamaConfig& decoder_of(const LlamaConfig& config) { return config; }
const LlamaConfig& decoder_of(const DeepseekV3Config& config) { return config.decoder; }
const LlamaConfig& decoder_of(const Qwen3NextConfig& config) { return config.decoder; }
const LlamaConfig& decoder_of(const MixtralConfig& config) { return config.decoder; }
const NemotronHConfig& decoder_of(const NemotronHConfig& config) { return config; }

}  // namespace

double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_magnitude(const YarnRopeScaling& scaling) {
  if (scaling.attention_factor > 0.0) return scaling.attention_factor;
  if (scaling.mscale == 0.0 || scaling.mscale_all_dim == 0.0)
    return yarn_mscale(scaling.factor, 1.0);
  return yarn_mscale(scaling.factor, scaling.mscale) /
         yarn_mscale(scaling.factor, scaling.mscale_all_dim);
}

bool has_qkv_bias(const LlamaConfig& c) {
  return c.attention_bias || c.family == LlamaFamily::kQwen2;
}

int64_t head_dim_of(const LlamaConfig& c) {
  return resolved_head_dim(c.head_dim, c.hidden_size, c.num_attention_heads);
}

int64_t head_dim_of(const NemotronHConfig& c) {
  return resolved_head_dim(c.head_dim, c.hidden_size, c.num_attention_heads);
}

bool has_layer(const NemotronHConfig& c, char kind) {
  return c.hybrid_override_pattern.find(kind) != std::string::npos ||
         (c.num_nextn_predict_layers > 0 &&
          c.mtp_hybrid_override_pattern.find(kind) != std::string::npos);
}

LayerType layer_type_of(const Qwen3NextConfig& c, int64_t layer) {
  if (!c.layer_types.empty()) return c.layer_types[static_cast<size_t>(layer)];
  return (layer + 1) % 4 == 0 ? LayerType::kFullAttention : LayerType::kLinearAttention;
}

bool has_experts(const Qwen3NextConfig& c, int64_t layer) {
  const auto& dense = c.mlp_only_layers;
  return (layer + 1) % c.decoder_sparse_step == 0 &&
         std::find(dense.begin(), dense.end(), layer) == dense.end();
}

int64_t rotary_dim_of(const Qwen3NextConfig& c) {
  return static_cast<int64_t>(static_cast<double>(head_dim_of(c.decoder)) *
                              c.partial_rotary_factor);
}

bool has_experts(const DeepseekV3Config& c, int64_t layer) {
  return layer >= c.first_k_dense_replace;
}

int64_t query_head_dim_of(const DeepseekV3Config& c) {
  return c.qk_nope_head_dim + head_dim_of(c.decoder);
}

void validate(const LlamaConfig& c) {
  check_dims({{"vocab_size", c.vocab_size}, {"intermediate_size", c.intermediate_size}});
  check_layers(c.num_hidden_layers, c.num_nextn_predict_layers);
  static_cast<void>(head_dim_of(c));
  check_kv_heads(c.num_key_value_heads, c.num_attention_heads);
  check_range(0, kMaxDim, {{"sliding_window", c.sliding_window}});
}

void validate(const MixtralConfig& c) {
  check_layers(c.decoder.num_hidden_layers, c.decoder.num_nextn_predict_layers);
  check_expert_count("num_local_experts", c.num_local_experts,
                     c.decoder.num_hidden_layers + c.decoder.num_nextn_predict_layers);
  check_range(0, kMaxDim, {{"shared_expert_intermediate_size", c.shared_expert_intermediate_size}});
  validate(c.decoder);
}

void validate(const NemotronHConfig& c) {
  check_dims({{"vocab_size", c.vocab_size},
              {"hidden_size", c.hidden_size},
              {"intermediate_size", c.intermediate_size},
              {"mamba_num_heads", c.mamba_num_heads},
              {"mamba_head_dim", c.mamba_head_dim},
              {"n_groups", c.n_groups},
              {"ssm_state_size", c.ssm_state_size},
              {"conv_kernel", c.conv_kernel}});
  check_pattern("hybrid_override_pattern", c.hybrid_override_pattern);
  int64_t num_layers = static_cast<int64_t>(c.hybrid_override_pattern.size());
  check_range(0, kMaxLayers, {{"num_nextn_predict_layers", c.num_nextn_predict_layers}});
  if (c.num_nextn_predict_layers > 0) {
    check_pattern("mtp_hybrid_override_pattern", c.mtp_hybrid_override_pattern);
    num_layers +=
        c.num_nextn_predict_layers * static_cast<int64_t>(c.mtp_hybrid_override_pattern.size());
    if (num_layers > kMaxLayers)
      throw UsageError(concat("num_nextn_predict_layers is ", c.num_nextn_predict_layers,
                              ", each with the layers of mtp_hybrid_override_pattern: ", num_layers,
                              " in all; at most ", kMaxLayers, " are supported"));
  }
  static_cast<void>(head_dim_of(c));
  check_kv_heads(c.num_key_value_heads, c.num_attention_heads);
  if (!has_layer(c, 'E')) return;
  check_expert_count("n_routed_experts", c.n_routed_experts, num_layers);
  check_dims({{"moe_intermediate_size", c.moe_intermediate_size}});
  check_range(0, kMaxDim,
              {{"moe_shared_expert_intermediate_size", c.moe_shared_expert_intermediate_size},
               {"moe_latent_size", c.moe_latent_size}});
}

void validate(const Qwen3NextConfig& c) {
  validate(c.decoder);
  const int64_t num_layers = c.decoder.num_hidden_layers;
  check_dims({{"linear_num_key_heads", c.linear_num_key_heads},
              {"linear_num_value_heads", c.linear_num_value_heads},
              {"linear_key_head_dim", c.linear_key_head_dim},
              {"linear_value_head_dim", c.linear_value_head_dim},
              {"linear_conv_kernel_dim", c.linear_conv_kernel_dim},
              {"moe_intermediate_size", c.moe_intermediate_size},
              {"shared_expert_intermediate_size", c.shared_expert_intermediate_size},
              {"decoder_sparse_step", c.decoder_sparse_step}});
  check_expert_count("num_experts", c.num_experts, num_layers);
  if (c.linear_num_value_heads % c.linear_num_key_heads != 0)
    throw UsageError(
        concat("linear_num_key_heads is ", c.linear_num_key_heads,
               "; it must divide linear_num_value_heads = ", c.linear_num_value_heads));
  if (!c.layer_types.empty() && static_cast<int64_t>(c.layer_types.size()) != num_layers)
    throw UsageError(concat("layer_types has ", c.layer_types.size(),
                            " entries; it needs one for each of num_hidden_layers = ", num_layers));
  for (const int64_t layer : c.mlp_only_layers)
    check_range(0, num_layers - 1, {{"mlp_only_layers", layer}});
  if (c.decoder.mlp_bias || c.decoder.num_nextn_predict_layers > 0)
    throw UsageError(
        "mlp_bias is true, or num_nextn_predict_layers is above 0; with Gated DeltaNet layers "
        "(model_type qwen3_next) neither is possible");
}

void validate(const DeepseekV3Config& c) {
  validate(c.decoder);
  check_dims({{"kv_lora_rank", c.kv_lora_rank},
              {"qk_nope_head_dim", c.qk_nope_head_dim},
              {"v_head_dim", c.v_head_dim},
              {"moe_intermediate_size", c.moe_intermediate_size}});
  check_range(0, kMaxDim,
              {{"q_lora_rank", c.q_lora_rank}, {"n_shared_experts", c.n_shared_experts}});
  check_range(0, c.decoder.num_hidden_layers, {{"first_k_dense_replace", c.first_k_dense_replace}});
  check_expert_count("n_routed_experts", c.n_routed_experts,
                     c.decoder.num_hidden_layers + c.decoder.num_nextn_predict_layers);
  if (c.decoder.num_key_value_heads != c.decoder.num_attention_heads)
    throw UsageError(concat("num_key_value_heads is ", c.decoder.num_key_value_heads,
                            "; with latent attention (model_type deepseek_v3) it must be "
                            "num_attention_heads = ",
                            c.decoder.num_attention_heads));
  if (c.decoder.mlp_bias || c.decoder.qk_norm || c.decoder.sliding_window > 0 ||
      c.decoder.family != LlamaFamily::kLlama)
    throw UsageError(
        "mlp_bias or qk_norm is true, sliding_window is above 0, or family is not kLlama; with "
        "latent attention (model_type deepseek_v3) none of them is possible");
}

void check_trainable(const ModelConfig& config) {
  std::visit([](const auto& c) { check_computable(c); }, config);
}

void check_shared_evenly(const char* field, int64_t size, int64_t tp) {
  if (size % tp != 0)
    throw UsageError(concat(field, " is ", size, ", which tp = ", tp,
                            " ranks cannot share evenly; choose a tp that divides it"));
}

namespace {

template <typename Config>
void check_heads(const Config& c, int64_t tp) {
  check_shared_evenly("num_attention_heads", c.num_attention_heads, tp);
  check_shared_evenly("num_key_value_heads", c.num_key_value_heads, tp);
}

void check_on_ranks(const LlamaConfig& c, int64_t tp) {
  check_heads(c, tp);
  check_shared_evenly("intermediate_size", c.intermediate_size, tp);
}

// Its experts are whole on every rank, or shared out by ep.
void check_on_ranks(const MixtralConfig& c, int64_t tp) { check_heads(c.decoder, tp); }

// The sizes of the kinds of layers that there are.
void check_on_ranks(const NemotronHConfig& c, int64_t tp) {
  if (has_layer(c, 'M')) check_shared_evenly("n_groups", c.n_groups, tp);
  if (has_layer(c, '*')) check_heads(c, tp);
  if (has_layer(c, '-')) check_shared_evenly("intermediate_size", c.intermediate_size, tp);
}

// As below.
void check_on_ranks(const DeepseekV3Config& c, int64_t tp) {
  check_heads(c.decoder, tp);
  if (c.first_k_dense_replace > 0)
    check_shared_evenly("intermediate_size", c.decoder.intermediate_size, tp);
}

// Experts as Mixtral's; dense layers are cut, if there are any.
void check_on_ranks(const Qwen3NextConfig& c, int64_t tp) {
  check_heads(c.decoder, tp);
  check_shared_evenly("linear_num_key_heads", c.linear_num_key_heads, tp);
  for (int64_t layer = 0; layer < c.decoder.num_hidden_layers; ++layer)
    if (!has_experts(c, layer))
      check_shared_evenly("intermediate_size", c.decoder.intermediate_size, tp);
}

}  // namespace

void check_tensor_ranks(const ModelConfig& config, int64_t tp) {
  if (tp > 1) std::visit([tp](const auto& c) { check_on_ranks(c, tp); }, config);
}

int64_t vocab_size_of(const ModelConfig& config) {
  return std::visit([](const auto& c) { return decoder_of(c).vocab_size; }, config);
}

int64_t max_positions_of(const ModelConfig& config) {
  return std::visit([](const auto& c) { return decoder_of(c).max_position_embeddings; }, config);
}

}  // namespace fsdp
