#include "fsdp/nn/config/config_json.h"

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/decoder_json.h"

namespace fsdp {

namespace {

using Json = nlohmann::ordered_json;

ModelConfig read_llama(const JsonFields& fields) { return read_decoder(fields, {}); }

// The classes of these families have no option for biases.
LlamaConfig read_unbiased(const JsonFields& fields, const DecoderDefaults& defaults) {
  LlamaConfig c = read_decoder(fields, defaults);
  c.attention_bias = c.mlp_bias = false;
  return c;
}

void expect_no_window(std::string& note, const JsonFields& fields) {
  if (fields.boolean_or("use_sliding_window", false))
    note_not_computed(note, fields, "use_sliding_window", "only false is computed");
}

// Absent, it is the class's default; null says that there is none.
int64_t read_window(const JsonFields& fields, int64_t absent) {
  if (fields.is_null("sliding_window")) return 0;
  const int64_t window = fields.integer_or("sliding_window", absent);
  if (fields.has("sliding_window") && window < 1)
    fields.refuse("sliding_window", "it must be at least 1, or null for no window");
  return window;
}

ModelConfig read_mistral(const JsonFields& fields) {
  LlamaConfig c = read_unbiased(fields, {.max_position_embeddings = 131072});
  c.num_key_value_heads = fields.integer_or("num_key_value_heads", 8);
  c.family = LlamaFamily::kMistral;
  c.sliding_window = read_window(fields, 4096);
  return c;
}

ModelConfig read_qwen2(const JsonFields& fields) {
  LlamaConfig c = read_unbiased(fields, {.max_position_embeddings = 32768});
  c.family = LlamaFamily::kQwen2;
  expect_no_window(c.not_computed, fields);
  return c;
}

ModelConfig read_qwen3(const JsonFields& fields) {
  LlamaConfig c = read_decoder(fields, {.max_position_embeddings = 32768, .head_dim = 128});
  c.mlp_bias = false;  // Qwen 3's class has no such option
  c.qk_norm = true;
  expect_no_window(c.not_computed, fields);
  return c;
}

ModelConfig read_mixtral(const JsonFields& fields) {
  MixtralConfig c;
  c.decoder = read_unbiased(
      fields, {.rms_norm_eps = 1e-5, .rope_theta = 1000000.0, .max_position_embeddings = 131072});
  c.decoder.sliding_window = read_window(fields, 0);
  c.decoder.num_key_value_heads = fields.integer("num_key_value_heads");
  c.num_local_experts = fields.integer("num_local_experts");
  c.num_experts_per_tok = fields.integer_or("num_experts_per_tok", c.num_experts_per_tok);
  c.router_aux_loss_coef = fields.number_or("router_aux_loss_coef", c.router_aux_loss_coef);
  c.shared_expert_intermediate_size = fields.integer_or("shared_expert_intermediate_size", 0);
  expect_zero(c.decoder.not_computed, fields, "router_jitter_noise");
  return c;
}

ModelConfig read_qwen3_moe(const JsonFields& fields) {
  MixtralConfig c;
  c.decoder = read_decoder(
      fields, {.max_position_embeddings = 32768, .intermediate_size = "moe_intermediate_size"});
  c.decoder.mlp_bias = false;  // no such option, as above
  c.decoder.qk_norm = true;
  // The package has both names.
  c.num_local_experts =
      fields.integer_or("num_experts", fields.integer_or("num_local_experts", 128));
  c.num_experts_per_tok = fields.integer_or("num_experts_per_tok", 8);
  c.norm_topk_prob = fields.boolean_or("norm_topk_prob", false);
  c.router_aux_loss_coef = fields.number_or("router_aux_loss_coef", c.router_aux_loss_coef);
  std::string& note = c.decoder.not_computed;
  if (fields.integer_or("decoder_sparse_step", 1) != 1)
    note_not_computed(note, fields, "decoder_sparse_step", "only 1 is computed");
  if (fields.has("mlp_only_layers") && !fields.array("mlp_only_layers").empty())
    note_not_computed(note, fields, "mlp_only_layers", "only an empty list is computed");
  expect_no_window(note, fields);
  return c;
}

struct PatternFields {
  const char* pattern;
  const char* words;  // version 5 of the package writes a list of words instead
};

std::string read_pattern(const JsonFields& fields, const PatternFields& names) {
  if (fields.has(names.pattern) || !fields.has(names.words)) return fields.text(names.pattern);
  constexpr std::array<std::pair<const char*, char>, 6> kKinds = {{{"linear_attention", 'M'},
                                                                   {"mamba", 'M'},
                                                                   {"full_attention", '*'},
                                                                   {"attention", '*'},
                                                                   {"mlp", '-'},
                                                                   {"moe", 'E'}}};
  std::string pattern;
  for (const nlohmann::json& layer : fields.array(names.words)) {
    const std::string word = layer.is_string() ? layer.get<std::string>() : "";
    const size_t before = pattern.size();
    for (const auto& [kind, letter] : kKinds)
      if (word == kind) pattern += letter;
    if (pattern.size() == before)
      fields.refuse(names.words,
                    "the known layers are linear_attention, full_attention, mlp and moe");
  }
  return pattern;
}

// The experts and the multi-token prediction; defaults are the package's. Two fields are ours.
void read_nemotron_experts(const JsonFields& fields, NemotronHConfig& c) {
  c.num_nextn_predict_layers = fields.integer_or("num_nextn_predict_layers", 0);
  if (c.num_nextn_predict_layers > 0) {
    if (fields.has("mtp_hybrid_override_pattern") || fields.has("mtp_layers_block_type"))
      c.mtp_hybrid_override_pattern =
          read_pattern(fields, {"mtp_hybrid_override_pattern", "mtp_layers_block_type"});
    c.mtp_loss_weight = fields.number_or("mtp_loss_weight", c.mtp_loss_weight);
  }
  if (!has_layer(c, 'E')) return;
  c.n_routed_experts = fields.integer_or("n_routed_experts", 8);
  c.num_experts_per_tok = fields.integer_or("num_experts_per_tok", c.num_experts_per_tok);
  c.moe_intermediate_size = fields.integer_or("moe_intermediate_size", 7688);
  c.moe_shared_expert_intermediate_size =
      fields.integer_or("moe_shared_expert_intermediate_size", 7688);
  c.moe_latent_size = fields.integer_or("moe_latent_size", 0);
  c.n_group = fields.integer_or("n_group", c.n_group);
  c.topk_group = fields.integer_or("topk_group", c.topk_group);
  c.norm_topk_prob = fields.boolean_or("norm_topk_prob", c.norm_topk_prob);
  c.routed_scaling_factor = fields.number_or("routed_scaling_factor", c.routed_scaling_factor);
  c.router_bias_update_rate =
      fields.number_or("router_bias_update_rate", c.router_bias_update_rate);
  c.router_aux_loss_coef = fields.number_or("router_aux_loss_coef", c.router_aux_loss_coef);
}

ModelConfig read_nemotron_h(const JsonFields& fields) {
  NemotronHConfig c;
  c.vocab_size = fields.integer("vocab_size");
  c.hidden_size = fields.integer("hidden_size");
  c.intermediate_size = fields.integer("intermediate_size");
  c.hybrid_override_pattern =
      read_pattern(fields, {"hybrid_override_pattern", "layers_block_type"});
  c.mamba_num_heads = fields.integer("mamba_num_heads");
  c.mamba_head_dim = fields.integer("mamba_head_dim");
  c.n_groups = fields.integer("n_groups");
  c.ssm_state_size = fields.integer("ssm_state_size");
  c.conv_kernel = fields.integer("conv_kernel");
  c.num_attention_heads = fields.integer("num_attention_heads");
  c.num_key_value_heads = fields.integer("num_key_value_heads");
  c.head_dim = read_head_dim(fields, "head_dim", read_head_dim(fields, "attention_head_dim", 0));
  c.use_conv_bias = fields.boolean_or("use_conv_bias", true);
  c.use_bias = fields.boolean_or("use_bias", false);
  c.attention_bias = fields.boolean_or("attention_bias", false);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  c.layer_norm_epsilon = fields.number_or("layer_norm_epsilon", c.layer_norm_epsilon);
  c.chunk_size = fields.integer_or("chunk_size", c.chunk_size);
  c.time_step_min = fields.number_or("time_step_min", c.time_step_min);
  c.max_position_embeddings =
      fields.integer_or("max_position_embeddings", c.max_position_embeddings);
  c.initializer_range = fields.number_or("initializer_range", c.initializer_range);
  const auto num_layers = static_cast<int64_t>(c.hybrid_override_pattern.size());
  if (fields.integer_or("num_hidden_layers", num_layers) != num_layers)
    fields.refuse("num_hidden_layers",
                  concat("hybrid_override_pattern has ", num_layers, " layers; make them agree"));
  read_nemotron_experts(fields, c);
  expect_text(c.not_computed, fields, "mlp_hidden_act", "relu2");
  expect_text(c.not_computed, fields, "mamba_hidden_act", "silu");
  expect_zero(c.not_computed, fields, "attention_dropout");
  expect_zero(c.not_computed, fields, "hidden_dropout");
  if (fields.boolean_or("residual_in_fp32", false))
    note_not_computed(c.not_computed, fields, "residual_in_fp32", "only false is computed");
  if (fields.has("sliding_window"))
    note_not_computed(c.not_computed, fields, "sliding_window", "only null is computed");
  return c;
}

struct Reader {
  const char* model_type;
  ModelConfig (*read)(const JsonFields& fields);
};

constexpr std::array<Reader, 9> kReaders = {{
    {"deepseek_v3", read_deepseek_v3},
    {"llama", read_llama},
    {"mistral", read_mistral},
    {"mixtral", read_mixtral},
    {"nemotron_h", read_nemotron_h},
    {"qwen2", read_qwen2},
    {"qwen3", read_qwen3},
    {"qwen3_moe", read_qwen3_moe},
    {"qwen3_next", read_qwen3_next},
}};

// A family whose class has no biases to choose, and no norms of heads.
Json unbiased_json(const char* model_type, const char* model_class, const LlamaConfig& c) {
  if (c.attention_bias || c.mlp_bias || c.qk_norm)
    throw UsageError(concat("attention_bias, mlp_bias or qk_norm is true; with model_type ",
                            model_type, " none of them is possible"));
  Json json = decoder_json(model_type, model_class, c);
  json.erase("attention_bias");
  json.erase("mlp_bias");
  return json;
}

Json window_json(int64_t window) { return window > 0 ? Json(window) : Json(nullptr); }

void refuse_window(const LlamaConfig& c, const char* model_type) {
  if (c.sliding_window > 0)
    throw UsageError(concat("sliding_window is ", c.sliding_window, "; with model_type ",
                            model_type, " only 0, none, is possible"));
}

Json to_json(const LlamaConfig& c) {
  if (c.family == LlamaFamily::kMistral) {
    Json json = unbiased_json("mistral", "MistralForCausalLM", c);
    json["sliding_window"] = window_json(c.sliding_window);
    return json;
  }
  if (c.family == LlamaFamily::kQwen2) {
    refuse_window(c, "qwen2");
    return unbiased_json("qwen2", "Qwen2ForCausalLM", c);
  }
  refuse_window(c, c.qk_norm ? "qwen3" : "llama");
  if (!c.qk_norm) return decoder_json("llama", "LlamaForCausalLM", c);
  if (c.mlp_bias)
    throw UsageError("mlp_bias is true; with qk_norm (model_type qwen3) only false is possible");
  Json json = decoder_json("qwen3", "Qwen3ForCausalLM", c);
  json.erase("mlp_bias");
  return json;
}

Json qwen3_moe_json(const MixtralConfig& c) {
  refuse_window(c.decoder, "qwen3_moe");
  if (c.decoder.mlp_bias || c.shared_expert_intermediate_size > 0)
    throw UsageError(
        "mlp_bias is true, or shared_expert_intermediate_size is above 0; with experts and qk_norm "
        "(model_type qwen3_moe) neither is possible");
  Json json = decoder_json("qwen3_moe", "Qwen3MoeForCausalLM", c.decoder);
  for (const char* field : {"mlp_bias", "intermediate_size"}) json.erase(field);
  json["moe_intermediate_size"] = c.decoder.intermediate_size;
  json["num_experts"] = c.num_local_experts;
  json["num_experts_per_tok"] = c.num_experts_per_tok;
  json["norm_topk_prob"] = c.norm_topk_prob;
  json["decoder_sparse_step"] = 1;
  json["router_aux_loss_coef"] = c.router_aux_loss_coef;
  json["output_router_logits"] = true;
  return json;
}

Json to_json(const MixtralConfig& c) {
  const LlamaConfig& decoder = c.decoder;
  if (decoder.qk_norm) return qwen3_moe_json(c);
  if (!c.norm_topk_prob)
    throw UsageError(
        "norm_topk_prob is false; with experts but without qk_norm (model_type mixtral) that is "
        "not possible");
  Json json = unbiased_json("mixtral", "MixtralForCausalLM", decoder);
  json["sliding_window"] = window_json(decoder.sliding_window);
  json["num_local_experts"] = c.num_local_experts;
  json["num_experts_per_tok"] = c.num_experts_per_tok;
  json["router_aux_loss_coef"] = c.router_aux_loss_coef;
  json["output_router_logits"] = true;
  if (c.shared_expert_intermediate_size > 0)
    json["shared_expert_intermediate_size"] = c.shared_expert_intermediate_size;
  return json;
}

void write_nemotron_experts(const NemotronHConfig& c, Json& json) {
  if (c.num_nextn_predict_layers > 0) {
    json["num_nextn_predict_layers"] = c.num_nextn_predict_layers;
    json["mtp_hybrid_override_pattern"] = c.mtp_hybrid_override_pattern;
    json["mtp_loss_weight"] = c.mtp_loss_weight;
  }
  if (!has_layer(c, 'E')) return;
  json["n_routed_experts"] = c.n_routed_experts;
  json["num_experts_per_tok"] = c.num_experts_per_tok;
  json["moe_intermediate_size"] = c.moe_intermediate_size;
  json["moe_shared_expert_intermediate_size"] = c.moe_shared_expert_intermediate_size;
  json["moe_latent_size"] = c.moe_latent_size > 0 ? Json(c.moe_latent_size) : Json(nullptr);
  json["n_group"] = c.n_group;
  json["topk_group"] = c.topk_group;
  json["norm_topk_prob"] = c.norm_topk_prob;
  json["routed_scaling_factor"] = c.routed_scaling_factor;
  json["router_bias_update_rate"] = c.router_bias_update_rate;
  json["router_aux_loss_coef"] = c.router_aux_loss_coef;
}

Json to_json(const NemotronHConfig& c) {
  Json json = {{"model_type", "nemotron_h"},
               {"architectures", Json::array({"NemotronHForCausalLM"})},
               {"vocab_size", c.vocab_size},
               {"hidden_size", c.hidden_size},
               {"num_hidden_layers", static_cast<int64_t>(c.hybrid_override_pattern.size())},
               {"hybrid_override_pattern", c.hybrid_override_pattern},
               {"intermediate_size", c.intermediate_size},
               {"mlp_hidden_act", "relu2"},
               {"mamba_hidden_act", "silu"},
               {"mamba_num_heads", c.mamba_num_heads},
               {"mamba_head_dim", c.mamba_head_dim},
               {"n_groups", c.n_groups},
               {"ssm_state_size", c.ssm_state_size},
               {"conv_kernel", c.conv_kernel},
               {"chunk_size", c.chunk_size},
               {"time_step_min", c.time_step_min},
               {"num_attention_heads", c.num_attention_heads},
               {"num_key_value_heads", c.num_key_value_heads},
               {"head_dim", head_dim_of(c)},
               {"use_conv_bias", c.use_conv_bias},
               {"use_bias", c.use_bias},
               {"attention_bias", c.attention_bias},
               {"mlp_bias", c.mlp_bias},
               {"tie_word_embeddings", c.tie_word_embeddings},
               {"layer_norm_epsilon", c.layer_norm_epsilon},
               {"max_position_embeddings", c.max_position_embeddings},
               {"initializer_range", c.initializer_range}};
  write_nemotron_experts(c, json);
  return json;
}

Json to_json(const Qwen3NextConfig& c) { return qwen3_next_json(c); }
Json to_json(const DeepseekV3Config& c) { return deepseek_v3_json(c); }

}  // namespace

std::vector<std::string> known_model_types() {
  std::vector<std::string> types;
  for (const Reader& reader : kReaders) types.emplace_back(reader.model_type);
  return types;
}

ModelConfig read_model_config(const JsonFields& fields) {
  const std::string model_type = fields.text("model_type");
  for (const Reader& reader : kReaders)
    if (reader.model_type == model_type) return reader.read(fields);
  fields.refuse("model_type", concat("known are ", join(known_model_types(), ", ")));
}

ModelConfig parse_model_config(std::string_view json_text, const std::string& source) {
  const nlohmann::json document = parse_json(json_text, source);
  return read_model_config(JsonFields(document, source, ""));
}

std::string config_json(const ModelConfig& config) {
  check_trainable(config);
  const Json json = std::visit([](const auto& c) { return to_json(c); }, config);
  return json.dump(2) + "\n";
}

}  // namespace fsdp
