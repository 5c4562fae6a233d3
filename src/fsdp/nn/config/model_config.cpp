#include "fsdp/nn/config/model_config.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/config_fields.h"

namespace fsdp {

namespace {

void check_range(const std::string& field, int64_t value, int64_t minimum, int64_t maximum) {
  if (value < minimum || value > maximum)
    throw UsageError(concat(field, " is ", value, "; it must be a whole number from ", minimum,
                            " to ", maximum));
}

void check_divides(const char* field, int64_t value, const char* divided_field, int64_t divided) {
  if (divided % value != 0)
    throw UsageError(
        concat(field, " is ", value, "; it must divide ", divided_field, " = ", divided));
}

// --- each field by itself ------------------------------------------------------------------------

// Tensors need whole numbers alone, computing the others, too.
enum class Checked : uint8_t { kIntegers, kNumbers };

class FieldChecker final : public FieldWalk {
 public:
  explicit FieldChecker(Checked checked, std::string model_type, std::string prefix = "")
      : checked_(checked), model_type_(std::move(model_type)), prefix_(std::move(prefix)) {}

  void integer(const Field& field, int64_t& value, IntegerRange range) override {
    if (checked_ == Checked::kIntegers || !prefix_.empty())
      check_range(prefix_ + field.name, value, range.least, range.most);
  }
  void number(const Field& field, double& value, NumberRule rule) override {
    if (checked_ == Checked::kIntegers) return;
    const bool is_above = rule == NumberRule::kAboveZero;
    if (!std::isfinite(value) || value < 0.0 || (is_above && value == 0.0))
      throw UsageError(concat(prefix_, field.name, " is ", value, "; it must be a number ",
                              is_above ? "above 0" : "from 0 up", ", and not infinite"));
  }
  void flag(const Field&, bool&) override {}
  void integer_or_null(const Field& field, int64_t& value) override {
    integer(field, value, kDimOrNone);
  }
  void other(const Field&, const std::function<void(const JsonFields&)>&,
             const std::function<Json()>&) override {}
  void rope(LlamaConfig& c, bool) override {
    if (checked_ == Checked::kIntegers) return;
    number({"rope_theta"}, c.rope_theta, NumberRule::kAboveZero);
    FieldChecker in_scaling(checked_, model_type_, "rope_scaling.");
    if (auto* yarn = std::get_if<YarnRopeScaling>(&c.rope_scaling)) walk_fields(in_scaling, *yarn);
    auto* llama3 = std::get_if<Llama3RopeScaling>(&c.rope_scaling);
    if (llama3 == nullptr) return;
    walk_fields(in_scaling, *llama3);
    if (llama3->high_freq_factor <= llama3->low_freq_factor)
      throw UsageError(concat("rope_scaling.high_freq_factor is ", llama3->high_freq_factor,
                              "; it must be above low_freq_factor = ", llama3->low_freq_factor));
  }
  void lacks(const char* name, const Json& value, const Json& only) override {
    if (checked_ == Checked::kNumbers && value != only)
      throw UsageError(concat(name, " is ", value.dump(), "; with model_type ", model_type_,
                              " only ", only.dump(), " is possible"));
  }

 private:
  const Checked checked_;
  const std::string model_type_;
  const std::string prefix_;
};

void check_fields(ModelConfig config, Checked checked) {
  FieldChecker checker(checked, family_of(config).model_type);
  walk_fields(checker, config);
}

// --- fields together: of tensors -----------------------------------------------------------------

// head_dim, or hidden_size / num_attention_heads when it is 0; all three are checked.
template <typename Config>
int64_t resolved_head_dim(const Config& c) {
  check_range("hidden_size", c.hidden_size, 1, kMaxDim);
  check_range("num_attention_heads", c.num_attention_heads, 1, kMaxDim);
  if (c.head_dim != 0) {
    check_range("head_dim", c.head_dim, 1, kMaxDim);
    return c.head_dim;
  }
  if (c.hidden_size % c.num_attention_heads != 0)
    throw UsageError(concat("hidden_size is ", c.hidden_size,
                            ", which num_attention_heads = ", c.num_attention_heads,
                            " does not divide; change one of them or set head_dim"));
  return c.hidden_size / c.num_attention_heads;
}

template <typename Config>
void check_heads(const Config& c) {
  static_cast<void>(head_dim_of(c));
  check_divides("num_key_value_heads", c.num_key_value_heads, "num_attention_heads",
                c.num_attention_heads);
}

void check_expert_count(const char* field, int64_t num_experts, int64_t num_layers) {
  check_range(field, num_experts, 1, kMaxDim);
  if (num_experts > kMaxExperts / num_layers)
    throw UsageError(concat(field, " is ", num_experts, " in ", num_layers, " layers; at most ",
                            kMaxExperts, " experts in all are supported"));
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

int64_t num_layers_of(const LlamaConfig& c) {
  return c.num_hidden_layers + c.num_nextn_predict_layers;
}

void check_shapes(const LlamaConfig& c) {
  check_range("num_nextn_predict_layers", c.num_nextn_predict_layers, 0,
              kMaxLayers - c.num_hidden_layers);
  check_heads(c);
  check_range("sliding_window", c.sliding_window, 0, kMaxDim);
}

void check_shapes(const MixtralConfig& c) {
  check_shapes(c.decoder);
  check_expert_count("num_local_experts", c.num_local_experts, num_layers_of(c.decoder));
}

void check_shapes(const NemotronHConfig& c) {
  check_pattern("hybrid_override_pattern", c.hybrid_override_pattern);
  auto num_layers = static_cast<int64_t>(c.hybrid_override_pattern.size());
  if (c.num_nextn_predict_layers > 0) {
    check_pattern("mtp_hybrid_override_pattern", c.mtp_hybrid_override_pattern);
    num_layers +=
        c.num_nextn_predict_layers * static_cast<int64_t>(c.mtp_hybrid_override_pattern.size());
    if (num_layers > kMaxLayers)
      throw UsageError(concat("num_nextn_predict_layers is ", c.num_nextn_predict_layers,
                              ", each with the layers of mtp_hybrid_override_pattern: ", num_layers,
                              " in all; at most ", kMaxLayers, " are supported"));
  }
  check_heads(c);
  if (has_layer(c, 'E')) check_expert_count("n_routed_experts", c.n_routed_experts, num_layers);
}

void check_shapes(const Qwen3NextConfig& c) {
  check_shapes(c.decoder);
  const int64_t num_layers = c.decoder.num_hidden_layers;
  check_expert_count("num_experts", c.num_experts, num_layers);
  check_divides("linear_num_key_heads", c.linear_num_key_heads, "linear_num_value_heads",
                c.linear_num_value_heads);
  if (!c.layer_types.empty() && static_cast<int64_t>(c.layer_types.size()) != num_layers)
    throw UsageError(concat("layer_types has ", c.layer_types.size(),
                            " entries; it needs one for each of num_hidden_layers = ", num_layers));
  for (const int64_t layer : c.mlp_only_layers)
    check_range("mlp_only_layers", layer, 0, num_layers - 1);
}

void check_shapes(const DeepseekV3Config& c) {
  check_shapes(c.decoder);
  check_range("first_k_dense_replace", c.first_k_dense_replace, 0, c.decoder.num_hidden_layers);
  check_expert_count("n_routed_experts", c.n_routed_experts, num_layers_of(c.decoder));
  if (c.decoder.num_key_value_heads != c.decoder.num_attention_heads)
    throw UsageError(concat("num_key_value_heads is ", c.decoder.num_key_value_heads,
                            "; with latent attention (model_type deepseek_v3) it must be "
                            "num_attention_heads = ",
                            c.decoder.num_attention_heads));
}

// --- fields together: of computing ---------------------------------------------------------------

void check_computable(const LlamaConfig& c) {
  if (!c.not_computed.empty()) throw UsageError(c.not_computed);
  if (head_dim_of(c) % 2 != 0)
    throw UsageError(concat("head_dim is ", head_dim_of(c),
                            "; rotary positions need an even one, so set head_dim"));
}

void check_computable(const MixtralConfig& c) {
  check_computable(c.decoder);
  check_range("num_experts_per_tok", c.num_experts_per_tok, 1, c.num_local_experts);
}

template <typename Config>
void check_router(const Config& c) {
  check_range("n_group", c.n_group, 1, c.n_routed_experts);
  check_range("topk_group", c.topk_group, 1, c.n_group);
  check_divides("n_group", c.n_group, "n_routed_experts", c.n_routed_experts);
  check_range("num_experts_per_tok", c.num_experts_per_tok, 1,
              c.n_routed_experts / c.n_group * c.topk_group);
}

void check_computable(const NemotronHConfig& c) {
  if (!c.not_computed.empty()) throw UsageError(c.not_computed);
  check_divides("n_groups", c.n_groups, "mamba_num_heads", c.mamba_num_heads);
  if (c.num_nextn_predict_layers > 0 &&
      c.mtp_hybrid_override_pattern.find('M') != std::string::npos)
    throw UsageError(
        "mtp_hybrid_override_pattern contains 'M'; layers that predict more tokens are computed "
        "with -, * and E");
  if (has_layer(c, 'E')) check_router(c);
}

void check_computable(const Qwen3NextConfig& c) {
  check_computable(c.decoder);
  check_range("num_experts_per_tok", c.num_experts_per_tok, 1, c.num_experts);
  if (!(c.partial_rotary_factor > 0.0 && c.partial_rotary_factor <= 1.0) || rotary_dim_of(c) < 2 ||
      rotary_dim_of(c) % 2 != 0)
    throw UsageError(concat("partial_rotary_factor is ", c.partial_rotary_factor,
                            "; times head_dim = ", head_dim_of(c.decoder),
                            " it must be an even number from 2 to head_dim"));
}

void check_computable(const DeepseekV3Config& c) {
  check_computable(c.decoder);
  check_router(c);
}

const NemotronHConfig& decoder_of(const NemotronHConfig& config) { return config; }
const LlamaConfig& decoder_of(const LlamaConfig& config) { return config; }
template <typename Config>
const LlamaConfig& decoder_of(const Config& config) {
  return config.decoder;
}

}  // namespace

bool has_qkv_bias(const LlamaConfig& c) {
  return c.attention_bias || c.family == LlamaFamily::kQwen2;
}

int64_t head_dim_of(const LlamaConfig& c) { return resolved_head_dim(c); }
int64_t head_dim_of(const NemotronHConfig& c) { return resolved_head_dim(c); }

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

std::string experts_module(const MixtralConfig& c) {
  return c.decoder.qk_norm ? "mlp" : "block_sparse_moe";
}

namespace {

std::vector<std::string> gated_projections() { return {"gate_proj", "up_proj", "down_proj"}; }

std::optional<ExpertNames> names_of_experts(const LlamaConfig&) { return std::nullopt; }

std::optional<ExpertNames> names_of_experts(const MixtralConfig& c) {
  return ExpertNames{
      experts_module(c) + ".experts",
      c.decoder.qk_norm ? gated_projections() : std::vector<std::string>{"w1", "w3", "w2"},
      c.num_local_experts, c.decoder.hidden_size, c.decoder.intermediate_size};
}

std::optional<ExpertNames> names_of_experts(const NemotronHConfig& c) {
  if (!has_layer(c, 'E')) return std::nullopt;
  return ExpertNames{"mixer.experts",
                     {"up_proj", "down_proj"},
                     c.n_routed_experts,
                     c.moe_latent_size > 0 ? c.moe_latent_size : c.hidden_size,
                     c.moe_intermediate_size};
}

std::optional<ExpertNames> names_of_experts(const Qwen3NextConfig& c) {
  return ExpertNames{"mlp.experts", gated_projections(), c.num_experts, c.decoder.hidden_size,
                     c.moe_intermediate_size};
}

std::optional<ExpertNames> names_of_experts(const DeepseekV3Config& c) {
  return ExpertNames{"mlp.experts", gated_projections(), c.n_routed_experts, c.decoder.hidden_size,
                     c.moe_intermediate_size};
}

}  // namespace

std::optional<ExpertNames> expert_names(const ModelConfig& config) {
  return std::visit([](const auto& c) { return names_of_experts(c); }, config);
}

std::array<StackedExperts, 2> stacked_experts(const ExpertNames& names) {
  const std::span<const std::string> into(names.projections.data(), names.projections.size() - 1);
  const auto num_into = static_cast<int64_t>(into.size());
  StackedExperts first{concat(names.module, ".", num_into == 1 ? into.front() : "gate_up_proj"),
                       {names.num_experts * num_into * names.intermediate_size, names.hidden_size},
                       names.num_experts,
                       {}};
  StackedExperts down{names.module + ".down_proj",
                      {names.num_experts * names.hidden_size, names.intermediate_size},
                      names.num_experts,
                      {}};
  for (int64_t expert = 0; expert < names.num_experts; ++expert) {
    const std::string prefix = concat(names.module, ".", expert, ".");
    for (const std::string& name : into) first.parts.push_back(concat(prefix, name, ".weight"));
    down.parts.push_back(concat(prefix, names.projections.back(), ".weight"));
  }
  return {std::move(first), std::move(down)};
}

void validate(const ModelConfig& config) {
  check_fields(config, Checked::kIntegers);
  std::visit([](const auto& c) { check_shapes(c); }, config);
}

void check_trainable(const ModelConfig& config) {
  validate(config);
  check_fields(config, Checked::kNumbers);
  std::visit([](const auto& c) { check_computable(c); }, config);
}

namespace {

void check_shared_evenly(const char* field, int64_t size, int64_t tp) {
  if (size % tp != 0)
    throw UsageError(concat(field, " is ", size, ", which tp = ", tp,
                            " ranks cannot share evenly; choose a tp that divides it"));
}

template <typename Config>
void check_heads_on_ranks(const Config& c, int64_t tp) {
  check_shared_evenly("num_attention_heads", c.num_attention_heads, tp);
  check_shared_evenly("num_key_value_heads", c.num_key_value_heads, tp);
}

void check_on_ranks(const LlamaConfig& c, int64_t tp) {
  check_heads_on_ranks(c, tp);
  check_shared_evenly("intermediate_size", c.intermediate_size, tp);
}

// Its experts are whole on every rank, or shared out by ep.
void check_on_ranks(const MixtralConfig& c, int64_t tp) { check_heads_on_ranks(c.decoder, tp); }

// The sizes of the kinds of layers that there are.
void check_on_ranks(const NemotronHConfig& c, int64_t tp) {
  if (has_layer(c, 'M')) check_shared_evenly("n_groups", c.n_groups, tp);
  if (has_layer(c, '*')) check_heads_on_ranks(c, tp);
  if (has_layer(c, '-')) check_shared_evenly("intermediate_size", c.intermediate_size, tp);
}

// Heads, and the dense layers if there are any; experts stay whole.
void check_on_ranks(const DeepseekV3Config& c, int64_t tp) {
  check_heads_on_ranks(c.decoder, tp);
  if (c.first_k_dense_replace > 0)
    check_shared_evenly("intermediate_size", c.decoder.intermediate_size, tp);
}

// Experts as Mixtral's; dense layers are cut, if there are any.
void check_on_ranks(const Qwen3NextConfig& c, int64_t tp) {
  check_heads_on_ranks(c.decoder, tp);
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
