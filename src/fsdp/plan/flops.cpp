#include "fsdp/plan/flops.h"

#include <algorithm>

#include "fsdp/plan/model_tensors.h"

namespace fsdp {

namespace {

// One product per weight in the forward and two in the backward, of two operations each.
constexpr double kPerWeight = 6.0;

// --- beside the weights, of one token's forward --------------------------------------------------

// The positions that one sees on average, itself included.
double visible_positions(int64_t window, double sequence) {
  const auto widest = static_cast<double>(window);
  if (window == 0 || sequence <= widest) return (sequence + 1.0) / 2.0;
  return widest - widest * (widest - 1.0) / (2.0 * sequence);
}

// Scores and the weighted sum of values: two products of head_dim per head and visible position.
template <typename Config>
double attention_products(const Config& c, int64_t window, double sequence) {
  return 2.0 * static_cast<double>(c.num_attention_heads * head_dim_of(c)) *
         visible_positions(window, sequence);
}

double mixer_products(const LlamaConfig& c, double sequence) {
  return static_cast<double>(c.num_hidden_layers + c.num_nextn_predict_layers) *
         attention_products(c, c.sliding_window, sequence);
}

double mixer_products(const MixtralConfig& c, double sequence) {
  return mixer_products(c.decoder, sequence);
}

// Products of the rule (nn/layers/gated_delta_net.cpp), in the layer's chunks.
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

double mixer_products(const Qwen3NextConfig& c, double sequence) {
  double sum = 0;
  for (int64_t layer = 0; layer < c.decoder.num_hidden_layers; ++layer)
    sum += layer_type_of(c, layer) == LayerType::kLinearAttention
               ? delta_rule_products(c, sequence)
               : attention_products(c.decoder, 0, sequence);
  return sum;
}

// Attention over keys and values of all heads, as they are computed from the short vectors.
double mixer_products(const DeepseekV3Config& c, double sequence) {
  const LlamaConfig& d = c.decoder;
  const int64_t widths = d.num_attention_heads * (query_head_dim_of(c) + c.v_head_dim);
  return static_cast<double>((d.num_hidden_layers + d.num_nextn_predict_layers) * widths) *
         visible_positions(0, sequence);
}

// Products of the scan: within a chunk every position meets every other one.
double scan_products(const NemotronHConfig& c, double sequence) {
  const double positions = std::min(sequence, static_cast<double>(c.chunk_size));
  const auto inner = static_cast<double>(c.mamba_num_heads * c.mamba_head_dim);
  const double scores = positions * static_cast<double>(c.n_groups * c.ssm_state_size);
  const double states = 2.0 * inner * static_cast<double>(c.ssm_state_size);
  return scores + positions * inner + states;
}

double mixer_products(const NemotronHConfig& c, double sequence) {
  const auto of_pattern = [&](const std::string& pattern) {
    double sum = 0;
    for (const char layer : pattern) {
      if (layer == 'M') sum += scan_products(c, sequence);
      if (layer == '*') sum += attention_products(c, 0, sequence);
    }
    return sum;
  };
  return of_pattern(c.hybrid_override_pattern) + static_cast<double>(c.num_nextn_predict_layers) *
                                                     of_pattern(c.mtp_hybrid_override_pattern);
}

// --- weights -------------------------------------------------------------------------------------

int64_t chosen_of(const LlamaConfig&) { return 0; }
template <typename Config>
int64_t chosen_of(const Config& c) {
  return c.num_experts_per_tok;
}

// Those that a token is multiplied with: all but vectors (norms, biases, decays) and the embedding,
// which is a lookup; of experts those of the chosen ones.
int64_t multiplied_weights(const ModelShape& model, int64_t num_chosen) {
  const UnitShape& embedding = model.units.front();
  int64_t sum = 0;
  for (const int64_t use : model.uses) {
    const UnitShape& unit = model.units[static_cast<size_t>(use)];
    if (unit.name == "lm_head") sum += embedding.numel();  // its matrix is as large, or the same
    if (&unit == &embedding || unit.name == "lm_head") continue;
    for (const TensorShape& tensor : unit.tensors) {
      if (tensor.shape.size() < 2) continue;
      sum += tensor.num_experts > 0 ? tensor.numel() / tensor.num_experts * num_chosen
                                    : tensor.numel();
    }
  }
  return sum;
}

}  // namespace

double flops_per_token(const ModelConfig& config, int64_t sequence) {
  const int64_t num_chosen = std::visit([](const auto& c) { return chosen_of(c); }, config);
  const double mixers = std::visit(
      [&](const auto& c) { return mixer_products(c, static_cast<double>(sequence)); }, config);
  const ModelShape model = build_model("model", config);
  return kPerWeight * (static_cast<double>(multiplied_weights(model, num_chosen)) + mixers);
}

}  // namespace fsdp
