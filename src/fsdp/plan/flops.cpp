#include "fsdp/plan/flops.h"

#include <algorithm>

#include "fsdp/plan/model_adapters.h"
#include "fsdp/plan/model_tensors.h"

namespace fsdp {

namespace {

// One product per weight in the forward and two in the backward, of two operations each.
constexpr double kPerWeight = 6.0;
constexpr double kPerFrozenWeight = 4.0;  // one in the backward

// The positions that one sees on average, itself included.
double visible_positions(int64_t window, double sequence) {
  const auto widest = static_cast<double>(window);
  if (window == 0 || sequence <= widest) return (sequence + 1.0) / 2.0;
  return widest - widest * (widest - 1.0) / (2.0 * sequence);
}

struct MixingProducts {
  double sequence;

  // Scores and the weighted sum of values: two products of head_dim per head and visible position.
  double operator()(const AttentionLayer& a) const {
    return 2.0 * static_cast<double>(a.queries()) * visible_positions(a.window, sequence);
  }

  // Attention over keys and values of all heads, as they are computed from the short vectors.
  double operator()(const LatentAttentionLayer& layer) const {
    const DeepseekV3Config& c = *layer.config;
    return static_cast<double>(c.decoder.num_attention_heads *
                               (query_head_dim_of(c) + c.v_head_dim)) *
           visible_positions(0, sequence);
  }

  // Within a chunk of the scan every position meets every other one.
  double operator()(const MambaLayer& layer) const {
    const NemotronHConfig& c = *layer.config;
    const double positions = std::min(sequence, static_cast<double>(c.chunk_size));
    const auto inner = static_cast<double>(c.mamba_num_heads * c.mamba_head_dim);
    const double scores = positions * static_cast<double>(c.n_groups * c.ssm_state_size);
    const double states = 2.0 * inner * static_cast<double>(c.ssm_state_size);
    return scores + positions * inner + states;
  }

  // Products of the rule (nn/layers/gated_delta_net.cpp), in the layer's chunks.
  double operator()(const DeltaNetLayer& layer) const {
    constexpr double kChunk = 64.0;
    const Qwen3NextConfig& c = *layer.config;
    const double positions = std::min(sequence, kChunk);
    const auto key_heads = static_cast<double>(c.linear_num_key_heads);
    const auto value_heads = static_cast<double>(c.linear_num_value_heads);
    const auto key = static_cast<double>(c.linear_key_head_dim);
    const auto value = static_cast<double>(c.linear_value_head_dim);
    const double overlaps = 2.0 * positions * key_heads * key;  // of keys with keys and queries
    // Per value head: the inverse, its products with keys and values, and the sum of corrections.
    const double within = positions * (positions / 2.0 + key + 2.0 * value);
    // The transition, and once per chunk its product with a state; what is written to the state,
    // and its answers to keys and queries.
    const double states = key * key + key * key * value / positions + 3.0 * key * value;
    return overlaps + value_heads * (within + states);
  }

  double operator()(const MlpLayer&) const { return 0; }
  double operator()(const ExpertsLayer&) const { return 0; }
};

}  // namespace

double mixing_products(const BlockShape& block, int64_t sequence) {
  double sum = 0;
  for (const BranchShape& branch : block.branches)
    sum += std::visit(MixingProducts{static_cast<double>(sequence)}, branch.layer);
  return sum;
}

double multiplied_elements(const TensorShape& tensor) {
  if (tensor.shape.size() < 2) return 0;
  const int64_t numel = tensor.numel();
  return static_cast<double>(tensor.num_experts > 0 ? numel / tensor.num_experts * tensor.num_chosen
                                                    : numel);
}

double flops_per_token(const ModelConfig& config, int64_t sequence, const LoraOptions& lora) {
  const ModelLayers layers = layers_of(config);
  ModelShape model = build_model("model", config);
  add_adapters(model, lora);
  const double of_frozen = lora.is_on() ? kPerFrozenWeight : kPerWeight;
  double sum = 0;
  for (const int64_t use : model.uses) {
    const auto unit = static_cast<size_t>(use);
    if (unit == 0) continue;           // a lookup
    if (unit == layers.head_unit()) {  // its matrix is as large as the embedding's, or the same
      sum += of_frozen * static_cast<double>(model.units.front().numel());
      continue;
    }
    sum += kPerWeight * mixing_products(layers.block_of_unit(unit), sequence);
    for (const TensorShape& tensor : model.units[unit].tensors)
      sum += (tensor.is_frozen ? of_frozen : kPerWeight) * multiplied_elements(tensor);
  }
  return sum;
}

}  // namespace fsdp
