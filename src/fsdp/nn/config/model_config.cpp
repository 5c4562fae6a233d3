#include "fsdp/nn/config/model_config.h"

#include <cmath>
#include <utility>

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

void check_rope(const LlamaConfig& c) {
  check_number("rope_theta", c.rope_theta, Above::kZero);
  if (head_dim_of(c) % 2 != 0)
    throw UsageError(concat("head_dim is ", head_dim_of(c),
                            "; rotary positions need an even one, so set head_dim"));
  if (!c.rope_scaling) return;
  check_number("rope_scaling.factor", c.rope_scaling->factor, Above::kZero);
  check_number("rope_scaling.low_freq_factor", c.rope_scaling->low_freq_factor, Above::kZero);
  check_number("rope_scaling.high_freq_factor", c.rope_scaling->high_freq_factor, Above::kZero);
  check_dims({{"rope_scaling.original_max_position_embeddings",
               c.rope_scaling->original_max_position_embeddings}});
  if (c.rope_scaling->high_freq_factor <= c.rope_scaling->low_freq_factor)
    throw UsageError(
        concat("rope_scaling.high_freq_factor is ", c.rope_scaling->high_freq_factor,
               "; it must be above low_freq_factor = ", c.rope_scaling->low_freq_factor));
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

void check_computable(const NemotronHConfig& c) {
  validate(c);
  check_computed(c.not_computed);
  check_positions(c.max_position_embeddings);
  check_number("layer_norm_epsilon", c.layer_norm_epsilon, Above::kZero);
  check_number("initializer_range", c.initializer_range, Above::kZeroOrEqual);
  check_number("time_step_min", c.time_step_min, Above::kZeroOrEqual);
  check_dims({{"chunk_size", c.chunk_size}});
  if (c.mamba_num_heads % c.n_groups != 0)
    throw UsageError(concat("n_groups is ", c.n_groups,
                            "; it must divide mamba_num_heads = ", c.mamba_num_heads));
}

const LlamaConfig& decoder_of(const LlamaConfig& config) { return config; }
const LlamaConfig& decoder_of(const MixtralConfig& config) { return config.decoder; }
const NemotronHConfig& decoder_of(const NemotronHConfig& config) { return config; }

}  // namespace

void check_range(int64_t minimum, int64_t maximum, std::initializer_list<IntegerField> fields) {
  for (const IntegerField& field : fields)
    if (field.value < minimum || field.value > maximum)
      throw UsageError(concat(field.name, " is ", field.value, "; it must be a whole number from ",
                              minimum, " to ", maximum));
}

void check_dims(std::initializer_list<IntegerField> fields) { check_range(1, kMaxDim, fields); }

int64_t resolved_head_dim(int64_t head_dim, int64_t hidden_size, int64_t num_attention_heads) {
  check_dims({{"hidden_size", hidden_size}, {"num_attention_heads", num_attention_heads}});
  if (head_dim != 0) {
    check_dims({{"head_dim", head_dim}});
    return head_dim;
  }
  if (hidden_size % num_attention_heads != 0)
    throw UsageError(concat("hidden_size is ", hidden_size,
                            ", which num_attention_heads = ", num_attention_heads,
                            " does not divide; change one of them or set head_dim"));
  return hidden_size / num_attention_heads;
}

void check_layers(int64_t num_hidden_layers, int64_t num_nextn_predict_layers) {
  check_range(1, kMaxLayers, {{"num_hidden_layers", num_hidden_layers}});
  check_range(0, kMaxLayers - num_hidden_layers,
              {{"num_nextn_predict_layers", num_nextn_predict_layers}});
}

void check_kv_heads(int64_t num_key_value_heads, int64_t num_attention_heads) {
  check_dims({{"num_key_value_heads", num_key_value_heads}});
  if (num_attention_heads % num_key_value_heads != 0)
    throw UsageError(concat("num_key_value_heads is ", num_key_value_heads,
                            "; it must divide num_attention_heads = ", num_attention_heads));
}

void check_expert_count(const char* field, int64_t num_experts, int64_t num_layers) {
  check_dims({{field, num_experts}});
  if (num_experts > kMaxExperts / num_layers)
    throw UsageError(concat(field, " is ", num_experts, " in ", num_layers, " layers; at most ",
                            kMaxExperts, " experts in all are supported"));
}

int64_t head_dim_of(const LlamaConfig& c) {
  return resolved_head_dim(c.head_dim, c.hidden_size, c.num_attention_heads);
}

int64_t head_dim_of(const NemotronHConfig& c) {
  return resolved_head_dim(c.head_dim, c.hidden_size, c.num_attention_heads);
}

std::string experts_module(const MixtralConfig& c) {
  return c.decoder.qk_norm ? "mlp" : "block_sparse_moe";
}

ExpertNames expert_names(const MixtralConfig& c) {
  const std::array<std::string, 3> qwen = {"gate_proj", "up_proj", "down_proj"};
  return {.module = experts_module(c) + ".experts",
          .projections = c.decoder.qk_norm ? qwen : std::array<std::string, 3>{"w1", "w3", "w2"},
          .num_experts = c.num_local_experts,
          .hidden_size = c.decoder.hidden_size,
          .intermediate_size = c.decoder.intermediate_size};
}

std::array<StackedExperts, 2> stacked_experts(const ExpertNames& names) {
  StackedExperts gate_up{
      .name = names.module + ".gate_up_proj",
      .shape = {names.num_experts * 2 * names.intermediate_size, names.hidden_size},
      .num_experts = names.num_experts,
      .parts = {}};
  StackedExperts down{.name = names.module + ".down_proj",
                      .shape = {names.num_experts * names.hidden_size, names.intermediate_size},
                      .num_experts = names.num_experts,
                      .parts = {}};
  const auto& [gate, up, down_name] = names.projections;
  for (int64_t expert = 0; expert < names.num_experts; ++expert) {
    const std::string prefix = concat(names.module, ".", expert, ".");
    gate_up.parts.push_back(concat(prefix, gate, ".weight"));
    gate_up.parts.push_back(concat(prefix, up, ".weight"));
    down.parts.push_back(concat(prefix, down_name, ".weight"));
  }
  return {std::move(gate_up), std::move(down)};
}

void validate(const LlamaConfig& c) {
  check_dims({{"vocab_size", c.vocab_size}, {"intermediate_size", c.intermediate_size}});
  check_layers(c.num_hidden_layers, c.num_nextn_predict_layers);
  static_cast<void>(head_dim_of(c));
  check_kv_heads(c.num_key_value_heads, c.num_attention_heads);
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
  if (c.hybrid_override_pattern.empty())
    throw UsageError("hybrid_override_pattern is empty; it needs one of M, - and * per layer");
  const auto num_layers = static_cast<int64_t>(c.hybrid_override_pattern.size());
  if (num_layers > kMaxLayers)
    throw UsageError(concat("hybrid_override_pattern has ", num_layers, " layers; at most ",
                            kMaxLayers, " are supported"));
  for (const char layer : c.hybrid_override_pattern)
    if (layer != 'M' && layer != '-' && layer != '*')
      throw UsageError(concat("hybrid_override_pattern contains '", shown({&layer, 1}),
                              "'; the known layers are M (Mamba-2), - (MLP) and * (attention)"));
  static_cast<void>(head_dim_of(c));
  check_kv_heads(c.num_key_value_heads, c.num_attention_heads);
}

void check_trainable(const ModelConfig& config) {
  std::visit([](const auto& c) { check_computable(c); }, config);
}

namespace {

void check_shared(const char* name, int64_t value, int64_t tp) {
  if (value % tp != 0)
    throw UsageError(concat(name, " is ", value, ", which tp = ", tp,
                            " ranks cannot share evenly; choose a tp that divides it"));
}

// Of all layers but the MLPs.
void check_decoder_on_ranks(const LlamaConfig& c, int64_t tp) {
  check_shared("num_attention_heads", c.num_attention_heads, tp);
  check_shared("num_key_value_heads", c.num_key_value_heads, tp);
  if (c.num_nextn_predict_layers > 0)
    throw UsageError(concat("num_nextn_predict_layers is ", c.num_nextn_predict_layers,
                            ", and tp = ", tp,
                            " ranks do not compute multi-token prediction together; train without "
                            "tp, or without these layers"));
}

void check_on_ranks(const LlamaConfig& c, int64_t tp) {
  check_decoder_on_ranks(c, tp);
  check_shared("intermediate_size", c.intermediate_size, tp);
}

// Its experts are whole on every rank, or shared out by ep.
void check_on_ranks(const MixtralConfig& c, int64_t tp) { check_decoder_on_ranks(c.decoder, tp); }

void check_on_ranks(const NemotronHConfig&, int64_t tp) {
  throw UsageError(concat("tp = ", tp,
                          " ranks do not compute the layers of a hybrid model together; train it "
                          "without tp"));
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
