#include "fsdp/nn/config/flops.h"

#include <algorithm>

namespace fsdp {

namespace {

// One product per weight in the forward and two in the backward, of two operations each.
constexpr double kPerWeight = 6.0;

// Scores and the weighted sum of values: two products of head_dim per head and visible position.
double attention_products(int64_t num_heads, int64_t head_dim, double sequence) {
  return 2.0 * static_cast<double>(num_heads * head_dim) * (sequence + 1.0) / 2.0;
}

struct Attention {
  int64_t hidden_size, num_heads, num_kv_heads, head_dim;
};

double attention_layer(const Attention& a, double sequence) {
  const int64_t weights = a.hidden_size * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads);
  return static_cast<double>(weights) + attention_products(a.num_heads, a.head_dim, sequence);
}

// Products of one token's forward, by kind of model.
double products(const LlamaConfig& c, double mlp_weights, double sequence) {
  const double layer =
      attention_layer({c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c)},
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

// As the scan computes: within a chunk every position meets every other one.
double scan_products(const NemotronHConfig& c, double sequence) {
  const double positions = std::min(sequence, static_cast<double>(c.chunk_size));
  const auto inner = static_cast<double>(c.mamba_num_heads * c.mamba_head_dim);
  const double scores = positions * static_cast<double>(c.n_groups * c.ssm_state_size);
  const double states = 2.0 * inner * static_cast<double>(c.ssm_state_size);
  return scores + positions * inner + states;
}

double products(const NemotronHConfig& c, double sequence) {
  double sum = static_cast<double>(c.vocab_size * c.hidden_size);
  const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
  const int64_t convolved = inner + 2 * c.n_groups * c.ssm_state_size;
  for (const char layer : c.hybrid_override_pattern) {
    if (layer == 'M')
      sum += static_cast<double>(c.hidden_size * (2 * inner + convolved + c.mamba_num_heads) +
                                 convolved * c.conv_kernel) +
             scan_products(c, sequence);
    else if (layer == '*')
      sum += attention_layer(
          {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c)}, sequence);
    else
      sum += static_cast<double>(2 * c.hidden_size * c.intermediate_size);
  }
  return sum;
}

}  // namespace

double flops_per_token(const ModelConfig& config, int64_t sequence) {
  return kPerWeight *
         std::visit([&](const auto& c) { return products(c, static_cast<double>(sequence)); },
                    config);
}

}  // namespace fsdp
