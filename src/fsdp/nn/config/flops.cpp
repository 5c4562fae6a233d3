#include "fsdp/nn/config/flops.h"

#include <algorithm>

namespace fsdp {

namespace {

// One product per weight in the forward and two in the backward, of two operations each.
constexpr double kPerWeight = 6.0;

// The positions that one sees on average, itself included.
double visible_positions(int64_t window, double sequence) {
  const auto widest = static_cast<double>(window);
  if (window == 0 || sequence <= widest) return (sequence + 1.0) / 2.0;
  return widest - widest * (widest - 1.0) / (2.0 * sequence);
}

struct Attention {
  int64_t hidden_size, num_heads, num_kv_heads, head_dim;
  int64_t window = 0;  // ScoreOptions
};

double attention_layer(const Attention& a, double sequence) {
  const int64_t weights = a.hidden_size * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads);
  // Scores and the weighted sum of values: two products of head_dim per head and visible position.
  return static_cast<double>(weights) + 2.0 * static_cast<double>(a.num_heads * a.head_dim) *
                                            visible_positions(a.window, sequence);
}

// Products of one token's forward, by kind of model.
double products(const LlamaConfig& c, double mlp_weights, double sequence) {
  const double layer = attention_layer({c.hidden_size, c.num_attention_heads, c.num_key_value_heads,
                                        head_dim_of(c), c.sliding_window},
                                       sequence) +
                       mlp_weights;
  const auto head = static_cast<double>(c.vocab_size * c.hidden_size);
  const auto join = static_cast<double>(2 * c.hidden_size * c.hidden_size);
  return static_cast<double>(c.num_hidden_layers) * layer + head +
         static_cast<double>(c.num_nextn_predict_layers) * (join + layer + head);
}

double products(const LlamaConfig& c, double sequence) {
  return products(c, static_cast<double>(3 * c.hidden_size * c.intermediate_size), sequence);
}

double products(const MixtralConfig& c, double sequence) {
  const LlamaConfig& decoder = c.decoder;
  const int64_t inner =
      c.num_experts_per_tok * decoder.intermediate_size + c.shared_expert_intermediate_size;
  const int64_t weights = decoder.hidden_size * (c.num_local_experts + 3 * inner);
  return products(decoder, static_cast<double>(weights), sequence);
}

// As the rule computes (layers/delta_rule.cpp), in the layer's chunks.
double delta_rule_products(const Qwen3NextConfig& c, double sequence) {
  constexpr double kChunk = 64.0;
  const double positions = std::min(sequence, kChunk);
  const auto key_heads = static_cast<double>(c.linear_num_key_heads);
  const auto value_heads = static_cast<double>(c.linear_num_value_heads);
  const auto key = static_cast<double>(c.linear_key_head_dim);
  const auto value = static_cast<double>(c.linear_value_head_dim);
  const double overlaps = 2.0 * positions * key_heads * key;  // of keys with keys and queries
  // Per value head: the inverse, its products with keys and values, and the sum of corrections.
  const double within = positions * (positions / 2.0 + key + 2.0 * value);
  // The transition, and once per chunk its product with a state; what is written to the state, and
  // its answers to keys and queries.
  const double states = key * key + key * key * value / positions + 3.0 * key * value;
  return overlaps + value_heads * (within + states);
}

double delta_net_layer(const Qwen3NextConfig& c, double sequence) {
  const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
  const int64_t values = c.linear_num_value_heads * c.linear_value_head_dim;
  const int64_t weights =
      c.decoder.hidden_size * (2 * keys + 3 * values + 2 * c.linear_num_value_heads) +
      (2 * keys + values) * c.linear_conv_kernel_dim;
  return static_cast<double>(weights) + delta_rule_products(c, sequence);
}

double products(const Qwen3NextConfig& config, double sequence) {
  const LlamaConfig& c = config.decoder;
  const Attention attention{c.hidden_size, c.num_attention_heads, c.num_key_value_heads,
                            head_dim_of(c)};
  const int64_t gates = c.hidden_size * c.num_attention_heads * head_dim_of(c);
  const int64_t inner = config.num_experts_per_tok * config.moe_intermediate_size +
                        config.shared_expert_intermediate_size;
  const int64_t experts = c.hidden_size * (config.num_experts + 3 * inner + 1);
  auto sum = static_cast<double>(c.vocab_size * c.hidden_size);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    sum += layer_type_of(config, layer) == LayerType::kLinearAttention
               ? delta_net_layer(config, sequence)
               : attention_layer(attention, sequence) + static_cast<double>(gates);
    sum += static_cast<double>(
        has_experts(config, layer) ? experts : 3 * c.hidden_size * c.intermediate_size);
  }
  return sum;
}

// Attention over keys and values of all heads, as they are computed from the short vectors.
double latent_attention_layer(const DeepseekV3Config& c, double sequence) {
  const int64_t hidden = c.decoder.hidden_size;
  const int64_t heads = c.decoder.num_attention_heads;
  const int64_t queries = heads * query_head_dim_of(c);
  const int64_t rotary = head_dim_of(c.decoder);
  const int64_t weights =
      (c.q_lora_rank > 0 ? c.q_lora_rank * (hidden + queries) : hidden * queries) +
      hidden * (c.kv_lora_rank + rotary) +
      c.kv_lora_rank * heads * (c.qk_nope_head_dim + c.v_head_dim) + heads * c.v_head_dim * hidden;
  return static_cast<double>(weights) +
         static_cast<double>(queries + heads * c.v_head_dim) * visible_positions(0, sequence);
}

double products(const DeepseekV3Config& config, double sequence) {
  const LlamaConfig& c = config.decoder;
  const int64_t inner =
      (config.num_experts_per_tok + config.n_shared_experts) * config.moe_intermediate_size;
  const int64_t experts = c.hidden_size * (config.n_routed_experts + 3 * inner);
  const auto head = static_cast<double>(c.vocab_size * c.hidden_size);
  const auto join = static_cast<double>(2 * c.hidden_size * c.hidden_size);
  double sum = head + static_cast<double>(c.num_nextn_predict_layers) * (join + head);
  for (int64_t layer = 0; layer < c.num_hidden_layers + c.num_nextn_predict_layers; ++layer)
    sum += latent_attention_layer(config, sequence) +
           static_cast<double>(
               has_experts(config, layer) ? experts : 3 * c.hidden_size * c.intermediate_size);
  return sum;
}

// As the scan computes: within a chunk every position meets every other one.
double scan_products(const NemotronHConfig& c, double sequence) {
  const double positions = std::min(sequence, static_cast<double>(c.chunk_size));
  const auto inner = static_cast<double>(c.mamba_num_heads * c.mamba_head_dim);
  const double scores = positions * static_cast<double>(c.n_groups * c.ssm_state_size);
  const double states = 2.0 * inner * static_cast<double>(c.ssm_state_size);
  return scores + positions * inner + states;
}

double expert_products(const NemotronHConfig& c) {
  const int64_t shared = c.hidden_size * (c.n_routed_experts + 2 * c.moe_latent_size +
                                          2 * c.moe_shared_expert_intermediate_size);
  const int64_t tokens = c.moe_latent_size > 0 ? c.moe_latent_size : c.hidden_size;
  return static_cast<double>(shared + 2 * c.num_experts_per_tok * tokens * c.moe_intermediate_size);
}

double products(const NemotronHConfig& c, const std::string& pattern, double sequence) {
  const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
  const int64_t convolved = inner + 2 * c.n_groups * c.ssm_state_size;
  double sum = 0;
  for (const char layer : pattern) {
    if (layer == 'M')
      sum += static_cast<double>(c.hidden_size * (2 * inner + convolved + c.mamba_num_heads) +
                                 convolved * c.conv_kernel) +
             scan_products(c, sequence);
    else if (layer == '*')
      sum += attention_layer(
          {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c)}, sequence);
    else if (layer == 'E')
      sum += expert_products(c);
    else
      sum += static_cast<double>(2 * c.hidden_size * c.intermediate_size);
  }
  return sum;
}

double products(const NemotronHConfig& c, double sequence) {
  const auto head = static_cast<double>(c.vocab_size * c.hidden_size);
  const auto join = static_cast<double>(2 * c.hidden_size * c.hidden_size);
  return head + products(c, c.hybrid_override_pattern, sequence) +
         static_cast<double>(c.num_nextn_predict_layers) *
             (join + products(c, c.mtp_hybrid_override_pattern, sequence) + head);
}

}  // namespace

double flops_per_token(const ModelConfig& config, int64_t sequence) {
  return kPerWeight *
         std::visit([&](const auto& c) { return products(c, static_cast<double>(sequence)); },
                    config);
}

}  // namespace fsdp
