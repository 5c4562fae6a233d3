#include "fsdp/nn/config/config_fields.h"

#include <algorithm>
#include <array>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using enum Matters;
using enum Presence;
using enum NumberRule;
using Json = FieldWalk::Json;
using Written = FieldWalk::Written;

constexpr Field needed(const char* name, Matters matters = kForTensors) {
  return {name, matters, kRequired};
}
constexpr Field unless_zero(const char* name, Matters matters = kForTensors) {
  return {name, matters, kUnlessZero};
}

constexpr IntegerRange kLayers{1, kMaxLayers};
constexpr IntegerRange kFurtherLayers{0, kMaxLayers};
constexpr IntegerRange kPositions{1, int64_t{1} << 31};

// In the struct 0 stands for "not given", so a file must not say 0. The last of the names is that
// which is written.
template <typename Config>
void walk_head_dim(FieldWalk& walk, Config& c, std::initializer_list<const char*> names) {
  walk.other(
      {std::data(names)[names.size() - 1]},
      [&](const JsonFields& fields) {
        for (const char* name : names) {
          if (!fields.has(name)) continue;
          c.head_dim = fields.integer(name);
          if (c.head_dim < 1)
            fields.refuse(
                name, "it must be at least 1; leave it out for hidden_size / num_attention_heads");
        }
      },
      [&] { return Json(head_dim_of(c)); });
}

// For `transformers`; nobody here reads it.
void write_router_logits(FieldWalk& walk) {
  walk.other(
      {"output_router_logits", kForTraining}, [](const JsonFields&) {}, [] { return Json(true); });
}

// --- Llama-like decoders -------------------------------------------------------------------------

void walk_window(FieldWalk& walk, LlamaConfig& c) {
  walk.other(
      {"sliding_window", kForResults},
      [&](const JsonFields& fields) {
        if (fields.is_null("sliding_window")) c.sliding_window = 0;
        if (!fields.has("sliding_window")) return;
        c.sliding_window = fields.integer("sliding_window");
        if (c.sliding_window < 1)
          fields.refuse("sliding_window", "it must be at least 1, or null for no window");
      },
      [&] { return c.sliding_window > 0 ? Json(c.sliding_window) : Json(nullptr); });
}

// Where the classes of the `transformers` package differ.
struct DecoderFields {
  const char* intermediate_size = "intermediate_size";
  const char* head_dim = "head_dim";
  Presence num_key_value_heads = kOptional;
  bool has_attention_bias = true;
  bool has_mlp_bias = false;
  bool has_window = false;
  bool has_partial_rotary = false;
  std::optional<Presence> further_layers = kUnlessZero;  // not given: they have none
};

void walk_decoder(FieldWalk& walk, LlamaConfig& c, const DecoderFields& family) {
  walk.integer(needed("vocab_size"), c.vocab_size);
  walk.integer(needed("hidden_size"), c.hidden_size);
  walk.integer(needed("num_hidden_layers"), c.num_hidden_layers, kLayers);
  walk.integer(needed("num_attention_heads"), c.num_attention_heads);
  walk.integer({"num_key_value_heads", kForTensors, family.num_key_value_heads,
                c.num_key_value_heads > 0 ? c.num_key_value_heads : c.num_attention_heads},
               c.num_key_value_heads);
  walk_head_dim(walk, c, {family.head_dim});
  walk.integer(needed(family.intermediate_size), c.intermediate_size);
  walk.only("hidden_act", "silu", Written::kYes);
  walk.only("attention_dropout", 0, Written::kNo);
  if (family.has_attention_bias)
    walk.flag({"attention_bias"}, c.attention_bias);
  else
    walk.lacks("attention_bias", c.attention_bias, false);
  if (family.has_mlp_bias)
    walk.flag({"mlp_bias"}, c.mlp_bias);
  else
    walk.lacks("mlp_bias", c.mlp_bias, false);
  walk.flag({"tie_word_embeddings"}, c.tie_word_embeddings);
  walk.number({"rms_norm_eps", kForResults}, c.rms_norm_eps, kAboveZero);
  walk.rope(c, family.has_partial_rotary);
  walk.integer({"max_position_embeddings", kForTraining}, c.max_position_embeddings, kPositions);
  walk.number({"initializer_range", kForTraining}, c.initializer_range, kFromZero);
  if (family.has_window) {
    walk_window(walk, c);
  } else {
    walk.lacks("sliding_window", c.sliding_window, 0);
    walk.only("use_sliding_window", false, Written::kNo);
  }
  if (!family.further_layers) {
    walk.only("num_nextn_predict_layers", 0, Written::kNo);
    walk.lacks("num_nextn_predict_layers", c.num_nextn_predict_layers, 0);
    return;
  }
  walk.integer({"num_nextn_predict_layers", kForTensors, *family.further_layers},
               c.num_nextn_predict_layers, kFurtherLayers);
  if (c.num_nextn_predict_layers > 0)
    walk.number({"mtp_loss_weight", kForTraining}, c.mtp_loss_weight, kFromZero);
}

void walk(FieldWalk& walk, LlamaConfig& c) {
  const bool is_llama = c.family == LlamaFamily::kLlama;
  walk_decoder(walk, c,
               {.has_attention_bias = is_llama,
                .has_mlp_bias = is_llama && !c.qk_norm,
                .has_window = c.family == LlamaFamily::kMistral});
  if (!is_llama) walk.lacks("qk_norm", c.qk_norm, false);
}

// --- Mixtral and Qwen3-MoE -----------------------------------------------------------------------

void walk_qwen3_moe(FieldWalk& walk, MixtralConfig& c) {
  walk_decoder(walk, c.decoder, {.intermediate_size = "moe_intermediate_size"});
  walk.lacks("shared_expert_intermediate_size", c.shared_expert_intermediate_size, 0);
  walk.other(
      {"num_experts"},
      [&](const JsonFields& fields) {  // the package has both names
        c.num_local_experts =
            fields.integer_or("num_experts", fields.integer_or("num_local_experts", 128));
      },
      [&] { return Json(c.num_local_experts); });
  walk.integer({"num_experts_per_tok", kForResults}, c.num_experts_per_tok);
  walk.flag({"norm_topk_prob", kForResults}, c.norm_topk_prob);
  walk.only("decoder_sparse_step", 1, Written::kYes);
  walk.only("mlp_only_layers", Json::array(), Written::kNo, "only an empty list is computed");
}

void walk_mixtral(FieldWalk& walk, MixtralConfig& c) {
  walk_decoder(walk, c.decoder,
               {.num_key_value_heads = kRequired, .has_attention_bias = false, .has_window = true});
  walk.lacks("norm_topk_prob", c.norm_topk_prob, true);
  walk.integer(needed("num_local_experts"), c.num_local_experts, {1, kMaxExperts});
  walk.integer({"num_experts_per_tok", kForResults}, c.num_experts_per_tok);
  walk.integer(unless_zero("shared_expert_intermediate_size"), c.shared_expert_intermediate_size,
               kDimOrNone);
  walk.only("router_jitter_noise", 0, Written::kNo);
}

void walk(FieldWalk& walk, MixtralConfig& c) {
  c.decoder.qk_norm ? walk_qwen3_moe(walk, c) : walk_mixtral(walk, c);
  walk.number({"router_aux_loss_coef", kForTraining}, c.router_aux_loss_coef, kFromZero);
  write_router_logits(walk);
}

// --- routers with biases -------------------------------------------------------------------------

template <typename Config>
void walk_router(FieldWalk& walk, Config& c) {
  walk.integer({"n_group", kForResults}, c.n_group);
  walk.integer({"topk_group", kForResults}, c.topk_group);
  walk.flag({"norm_topk_prob", kForResults}, c.norm_topk_prob);
  walk.number({"routed_scaling_factor", kForResults}, c.routed_scaling_factor, kAboveZero);
  walk.number({"router_bias_update_rate", kForTraining}, c.router_bias_update_rate, kFromZero);
  walk.number({"router_aux_loss_coef", kForTraining}, c.router_aux_loss_coef, kFromZero);
}

// --- Nemotron-H ----------------------------------------------------------------------------------

// Version 5 of the package writes a list of words (`words`) instead of a pattern.
std::string read_pattern(const JsonFields& fields, const char* name, const char* words) {
  if (fields.has(name) || !fields.has(words)) return fields.text(name);
  constexpr std::array<std::pair<const char*, char>, 6> kKinds = {{{"linear_attention", 'M'},
                                                                   {"mamba", 'M'},
                                                                   {"full_attention", '*'},
                                                                   {"attention", '*'},
                                                                   {"mlp", '-'},
                                                                   {"moe", 'E'}}};
  std::string pattern;
  for (const nlohmann::json& layer : fields.array(words)) {
    const auto kind = std::find_if(kKinds.begin(), kKinds.end(),
                                   [&](const auto& each) { return layer == each.first; });
    if (kind == kKinds.end())
      fields.refuse(words, "the known layers are linear_attention, full_attention, mlp and moe");
    pattern += kind->second;
  }
  return pattern;
}

void walk_nemotron_layers(FieldWalk& walk, NemotronHConfig& c) {
  walk.other(
      {"hybrid_override_pattern"},
      [&](const JsonFields& fields) {
        c.hybrid_override_pattern =
            read_pattern(fields, "hybrid_override_pattern", "layers_block_type");
      },
      [&] { return Json(c.hybrid_override_pattern); });
  const auto num_layers = static_cast<int64_t>(c.hybrid_override_pattern.size());
  walk.other(
      {"num_hidden_layers"},
      [&](const JsonFields& fields) {
        if (fields.integer_or("num_hidden_layers", num_layers) != num_layers)
          fields.refuse("num_hidden_layers", concat("hybrid_override_pattern has ", num_layers,
                                                    " layers; make them agree"));
      },
      [&] { return Json(num_layers); });
}

void walk_nemotron_predictions(FieldWalk& walk, NemotronHConfig& c) {
  walk.integer(unless_zero("num_nextn_predict_layers"), c.num_nextn_predict_layers, kFurtherLayers);
  if (c.num_nextn_predict_layers == 0) return;
  walk.other(
      {"mtp_hybrid_override_pattern"},
      [&](const JsonFields& fields) {
        if (fields.has("mtp_hybrid_override_pattern") || fields.has("mtp_layers_block_type"))
          c.mtp_hybrid_override_pattern =
              read_pattern(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type");
      },
      [&] { return Json(c.mtp_hybrid_override_pattern); });
  walk.number({"mtp_loss_weight", kForTraining}, c.mtp_loss_weight, kFromZero);
}

void walk_nemotron_experts(FieldWalk& walk, NemotronHConfig& c) {
  walk.integer({.name = "n_routed_experts", .absent = 8}, c.n_routed_experts, {1, kMaxExperts});
  walk.integer({"num_experts_per_tok", kForResults}, c.num_experts_per_tok);
  walk.integer({.name = "moe_intermediate_size", .absent = 7688}, c.moe_intermediate_size);
  walk.integer({.name = "moe_shared_expert_intermediate_size", .absent = 7688},
               c.moe_shared_expert_intermediate_size, kDimOrNone);
  walk.integer_or_null({"moe_latent_size"}, c.moe_latent_size);
  walk_router(walk, c);
}

void walk(FieldWalk& walk, NemotronHConfig& c) {
  walk.integer(needed("vocab_size"), c.vocab_size);
  walk.integer(needed("hidden_size"), c.hidden_size);
  walk_nemotron_layers(walk, c);
  walk.integer(needed("intermediate_size"), c.intermediate_size);
  walk.only("mlp_hidden_act", "relu2", Written::kYes);
  walk.only("mamba_hidden_act", "silu", Written::kYes);
  walk.integer(needed("mamba_num_heads"), c.mamba_num_heads);
  walk.integer(needed("mamba_head_dim"), c.mamba_head_dim);
  walk.integer(needed("n_groups"), c.n_groups);
  walk.integer(needed("ssm_state_size"), c.ssm_state_size);
  walk.integer(needed("conv_kernel"), c.conv_kernel);
  walk.integer({"chunk_size", kForTraining}, c.chunk_size);
  walk.number({"time_step_min", kForResults}, c.time_step_min, kFromZero);
  walk.integer(needed("num_attention_heads"), c.num_attention_heads);
  walk.integer(needed("num_key_value_heads"), c.num_key_value_heads);
  walk_head_dim(walk, c, {"attention_head_dim", "head_dim"});  // the package has both names
  walk.flag({"use_conv_bias"}, c.use_conv_bias);
  walk.flag({"use_bias"}, c.use_bias);
  walk.flag({"attention_bias"}, c.attention_bias);
  walk.flag({"mlp_bias"}, c.mlp_bias);
  walk.flag({"tie_word_embeddings"}, c.tie_word_embeddings);
  walk.number({"layer_norm_epsilon", kForResults}, c.layer_norm_epsilon, kAboveZero);
  walk.integer({"max_position_embeddings", kForTraining}, c.max_position_embeddings, kPositions);
  walk.number({"initializer_range", kForTraining}, c.initializer_range, kFromZero);
  walk_nemotron_predictions(walk, c);
  if (has_layer(c, 'E')) walk_nemotron_experts(walk, c);
  walk.only("attention_dropout", 0, Written::kNo);
  walk.only("hidden_dropout", 0, Written::kNo);
  walk.only("residual_in_fp32", false, Written::kNo);
  walk.only("sliding_window", nullptr, Written::kNo);
}

// --- Qwen3-Next ----------------------------------------------------------------------------------

constexpr std::array<std::pair<const char*, LayerType>, 2> kLayerTypes = {
    {{"linear_attention", LayerType::kLinearAttention},
     {"full_attention", LayerType::kFullAttention}}};

// A list of words, or how often attention comes. Always the list, so that configurations that mean
// the same are the same.
std::vector<LayerType> read_layer_types(const JsonFields& fields, int64_t num_layers) {
  std::vector<LayerType> types;
  if (fields.has("layer_types")) {
    for (const nlohmann::json& layer : fields.array("layer_types")) {
      const auto type = std::find_if(kLayerTypes.begin(), kLayerTypes.end(),
                                     [&](const auto& each) { return layer == each.first; });
      if (type == kLayerTypes.end())
        fields.refuse("layer_types", "the known layers are linear_attention and full_attention");
      types.push_back(type->second);
    }
    if (types.empty()) fields.refuse("layer_types", "it needs one entry per layer");
    return types;
  }
  const int64_t interval = fields.integer_or("full_attention_interval", 4);
  if (interval < 1) fields.refuse("full_attention_interval", "it must be at least 1");
  if (num_layers > kMaxLayers) return types;  // which validate() refuses
  for (int64_t layer = 1; layer <= num_layers; ++layer)
    types.push_back(layer % interval == 0 ? LayerType::kFullAttention
                                          : LayerType::kLinearAttention);
  return types;
}

Json layer_types_json(const Qwen3NextConfig& c) {
  Json words = Json::array();
  for (int64_t layer = 0; layer < c.decoder.num_hidden_layers; ++layer)
    for (const auto& [word, type] : kLayerTypes)
      if (type == layer_type_of(c, layer)) words.push_back(word);
  return words;
}

std::vector<int64_t> read_dense_layers(const JsonFields& fields) {
  std::vector<int64_t> layers;
  if (!fields.has("mlp_only_layers")) return layers;
  for (const nlohmann::json& layer : fields.array("mlp_only_layers")) {
    if (!layer.is_number_integer())
      fields.refuse("mlp_only_layers", "it must be a list of numbers of layers, from 0 up");
    layers.push_back(layer.get<int64_t>());
  }
  return layers;
}

double read_partial_rotary_factor(const JsonFields& fields) {
  const double factor = fields.number_or("partial_rotary_factor", 0.25);
  for (const char* field : {"rope_scaling", "rope_parameters"})
    if (fields.has(field)) return fields.object(field).number_or("partial_rotary_factor", factor);
  return factor;
}

// The layers of multi-token prediction that published checkpoints have beside the model ("mtp.")
// are in no field, and the package leaves them out, too.
void walk(FieldWalk& walk, Qwen3NextConfig& c) {
  walk_decoder(walk, c.decoder, {.has_partial_rotary = true, .further_layers = std::nullopt});
  walk.other(
      {"partial_rotary_factor", kForResults},
      [&](const JsonFields& fields) {
        c.partial_rotary_factor = read_partial_rotary_factor(fields);
      },
      [&] { return Json(c.partial_rotary_factor); });
  walk.other(
      {"layer_types"},
      [&](const JsonFields& fields) {
        c.layer_types = read_layer_types(fields, c.decoder.num_hidden_layers);
      },
      [&] { return layer_types_json(c); });
  walk.integer({"linear_num_key_heads"}, c.linear_num_key_heads);
  walk.integer({"linear_num_value_heads"}, c.linear_num_value_heads);
  walk.integer({"linear_key_head_dim"}, c.linear_key_head_dim);
  walk.integer({"linear_value_head_dim"}, c.linear_value_head_dim);
  walk.integer({"linear_conv_kernel_dim"}, c.linear_conv_kernel_dim);
  walk.integer({"num_experts"}, c.num_experts, {1, kMaxExperts});
  walk.integer({"num_experts_per_tok", kForResults}, c.num_experts_per_tok);
  walk.integer({"moe_intermediate_size"}, c.moe_intermediate_size);
  walk.integer({"shared_expert_intermediate_size"}, c.shared_expert_intermediate_size);
  walk.flag({"norm_topk_prob", kForResults}, c.norm_topk_prob);
  walk.integer({"decoder_sparse_step"}, c.decoder_sparse_step);
  walk.other(
      {"mlp_only_layers"},
      [&](const JsonFields& fields) { c.mlp_only_layers = read_dense_layers(fields); },
      [&] { return Json(c.mlp_only_layers); });
  walk.number({"router_aux_loss_coef", kForTraining}, c.router_aux_loss_coef, kFromZero);
  write_router_logits(walk);
}

// --- DeepSeek-V3 ---------------------------------------------------------------------------------

void walk(FieldWalk& walk, DeepseekV3Config& c) {
  // The package's class, too, has qk_rope_head_dim as head_dim, whatever the file says of that.
  // Its default of num_nextn_predict_layers is 1.
  walk_decoder(walk, c.decoder, {.head_dim = "qk_rope_head_dim", .further_layers = kOptional});
  walk.lacks("qk_norm", c.decoder.qk_norm, false);
  walk.integer_or_null({"q_lora_rank"}, c.q_lora_rank);  // null: projected in one step
  walk.integer({"kv_lora_rank"}, c.kv_lora_rank);
  walk.integer({"qk_nope_head_dim"}, c.qk_nope_head_dim);
  walk.integer({"v_head_dim"}, c.v_head_dim);
  walk.flag({"rope_interleave", kForResults}, c.rope_interleave);
  walk.integer({"first_k_dense_replace"}, c.first_k_dense_replace, {0, kMaxLayers});
  walk.integer({"n_routed_experts"}, c.n_routed_experts, {1, kMaxExperts});
  walk.integer({"n_shared_experts"}, c.n_shared_experts, kDimOrNone);
  walk.integer({"num_experts_per_tok", kForResults}, c.num_experts_per_tok);
  walk.integer({"moe_intermediate_size"}, c.moe_intermediate_size);
  walk.only("scoring_func", "sigmoid", Written::kYes);
  walk.only("topk_method", "noaux_tc", Written::kYes);
  walk_router(walk, c);
  walk.other({"moe_layer_freq"},
             [](const JsonFields& fields) {
               if (fields.integer_or("moe_layer_freq", 1) != 1)
                 fields.refuse("moe_layer_freq", "only 1 is supported (experts in every layer)");
             },
             {});
  walk.only("quantization_config", nullptr, Written::kNo,
            "weights with scales are not read; convert them to bf16 and leave the field out");
}

LlamaConfig decoder_with(int64_t max_position_embeddings, int64_t head_dim = 0) {
  return {.head_dim = head_dim,
          .rms_norm_eps = 1e-6,
          .max_position_embeddings = max_position_embeddings};
}

std::vector<ModelFamily> all_families() {
  LlamaConfig mistral = decoder_with(131072);
  mistral.num_key_value_heads = 8;
  mistral.family = LlamaFamily::kMistral;
  mistral.sliding_window = 4096;
  LlamaConfig qwen2 = decoder_with(32768);
  qwen2.family = LlamaFamily::kQwen2;
  LlamaConfig qwen3 = decoder_with(32768, 128);
  LlamaConfig qwen3_moe = decoder_with(32768);
  qwen3.qk_norm = qwen3_moe.qk_norm = true;
  LlamaConfig mixtral = decoder_with(131072);
  mixtral.rms_norm_eps = 1e-5;
  mixtral.rope_theta = 1000000.0;
  return {
      {"deepseek_v3", "DeepseekV3ForCausalLM",
       DeepseekV3Config{.decoder = decoder_with(4096, 64), .q_lora_rank = 1536}},
      {"llama", "LlamaForCausalLM", decoder_with(2048)},
      {"mistral", "MistralForCausalLM", mistral},
      {"mixtral", "MixtralForCausalLM", MixtralConfig{.decoder = mixtral}},
      {"nemotron_h", "NemotronHForCausalLM", NemotronHConfig{}},
      {"qwen2", "Qwen2ForCausalLM", qwen2},
      {"qwen3", "Qwen3ForCausalLM", qwen3},
      {"qwen3_moe", "Qwen3MoeForCausalLM",
       MixtralConfig{.decoder = qwen3_moe, .num_experts_per_tok = 8, .norm_topk_prob = false}},
      {"qwen3_next", "Qwen3NextForCausalLM", Qwen3NextConfig{.decoder = decoder_with(32768, 256)}}};
}

bool are_of_one_family(const ModelConfig& a, const ModelConfig& b) {
  if (a.index() != b.index()) return false;
  if (const auto* llama = std::get_if<LlamaConfig>(&a)) {
    const auto& other = std::get<LlamaConfig>(b);
    return llama->family == other.family &&
           (llama->family != LlamaFamily::kLlama || llama->qk_norm == other.qk_norm);
  }
  const auto* mixtral = std::get_if<MixtralConfig>(&a);
  return mixtral == nullptr ||
         mixtral->decoder.qk_norm == std::get<MixtralConfig>(b).decoder.qk_norm;
}

}  // namespace

const std::vector<ModelFamily>& model_families() {
  static const std::vector<ModelFamily> families = all_families();
  return families;
}

const ModelFamily& family_of(const ModelConfig& config) {
  return *std::find_if(
      model_families().begin(), model_families().end(),
      [&](const ModelFamily& family) { return are_of_one_family(family.absent, config); });
}

void walk_fields(FieldWalk& field_walk, ModelConfig& config) {
  std::visit([&](auto& c) { walk(field_walk, c); }, config);
}

void walk_fields(FieldWalk& walk, Llama3RopeScaling& scaling) {
  walk.number(needed("factor", kForResults), scaling.factor, kAboveZero);
  walk.number(needed("low_freq_factor", kForResults), scaling.low_freq_factor, kAboveZero);
  walk.number(needed("high_freq_factor", kForResults), scaling.high_freq_factor, kAboveZero);
  walk.integer(needed("original_max_position_embeddings", kForResults),
               scaling.original_max_position_embeddings);
}

void walk_fields(FieldWalk& walk, YarnRopeScaling& scaling) {
  walk.number(needed("factor", kForResults), scaling.factor, kAboveZero);
  walk.integer(needed("original_max_position_embeddings", kForResults),
               scaling.original_max_position_embeddings);
  walk.number({"beta_fast"}, scaling.beta_fast, kAboveZero);
  walk.number({"beta_slow"}, scaling.beta_slow, kAboveZero);
  walk.number(unless_zero("mscale", kForResults), scaling.mscale, kFromZero);
  walk.number(unless_zero("mscale_all_dim", kForResults), scaling.mscale_all_dim, kFromZero);
  walk.number(unless_zero("attention_factor", kForResults), scaling.attention_factor, kFromZero);
}

}  // namespace fsdp
