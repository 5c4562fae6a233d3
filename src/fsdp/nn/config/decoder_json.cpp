#include "fsdp/nn/config/decoder_json.h"

#include <initializer_list>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

using Json = nlohmann::ordered_json;

void require(const JsonFields& rope, const char* type, std::initializer_list<const char*> needed) {
  for (const char* field : needed)
    if (!rope.has(field)) rope.refuse(field, concat("\"", type, "\" scaling needs it; add it"));
}

Llama3RopeScaling read_llama3_scaling(const JsonFields& rope) {
  require(rope, "llama3",
          {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"});
  Llama3RopeScaling scaling;
  scaling.factor = rope.number_or("factor", scaling.factor);
  scaling.low_freq_factor = rope.number_or("low_freq_factor", scaling.low_freq_factor);
  scaling.high_freq_factor = rope.number_or("high_freq_factor", scaling.high_freq_factor);
  scaling.original_max_position_embeddings =
      rope.integer_or("original_max_position_embeddings", scaling.original_max_position_embeddings);
  return scaling;
}

YarnRopeScaling read_yarn_scaling(const JsonFields& rope, std::string& not_computed) {
  require(rope, "yarn", {"factor", "original_max_position_embeddings"});
  YarnRopeScaling scaling;
  scaling.factor = rope.number_or("factor", scaling.factor);
  scaling.original_max_position_embeddings =
      rope.integer_or("original_max_position_embeddings", scaling.original_max_position_embeddings);
  scaling.beta_fast = rope.number_or("beta_fast", scaling.beta_fast);
  scaling.beta_slow = rope.number_or("beta_slow", scaling.beta_slow);
  scaling.mscale = rope.number_or("mscale", scaling.mscale);
  scaling.mscale_all_dim = rope.number_or("mscale_all_dim", scaling.mscale_all_dim);
  scaling.attention_factor = rope.number_or("attention_factor", scaling.attention_factor);
  if (!rope.boolean_or("truncate", true))
    note_not_computed(not_computed, rope, "truncate", "only true is computed");
  return scaling;
}

void read_rope_scaling(const JsonFields& rope, LlamaConfig& c) {
  // Until version 4.43 the package wrote "type".
  const std::string type = rope.text_or("rope_type", rope.text_or("type", "default"));
  const char* type_field = rope.has("rope_type") ? "rope_type" : "type";
  if (type == "llama3")
    c.rope_scaling = read_llama3_scaling(rope);
  else if (type == "yarn")
    c.rope_scaling = read_yarn_scaling(rope, c.not_computed);
  else if (type != "default")
    note_not_computed(c.not_computed, rope, type_field,
                      "only \"default\", \"llama3\" and \"yarn\" are computed");
}

// Version 5 of the package keeps everything in "rope_parameters", earlier ones in two fields.
void read_rope(const JsonFields& fields, const DecoderDefaults& defaults, LlamaConfig& c) {
  c.rope_theta = fields.number_or("rope_theta", defaults.rope_theta);
  for (const char* field : {"rope_scaling", "rope_parameters"}) {
    if (!fields.has(field)) continue;
    const JsonFields rope = fields.object(field);
    c.rope_theta = rope.number_or("rope_theta", c.rope_theta);
    if (!defaults.has_partial_rotary && rope.number_or("partial_rotary_factor", 1.0) != 1.0)
      note_not_computed(c.not_computed, rope, "partial_rotary_factor", "only 1 is computed");
    read_rope_scaling(rope, c);
    return;
  }
}

Json scaling_json(const std::monostate&) { return nullptr; }

Json scaling_json(const Llama3RopeScaling& scaling) {
  return {{"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_freq_factor},
          {"high_freq_factor", scaling.high_freq_factor},
          {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
}

Json scaling_json(const YarnRopeScaling& scaling) {
  Json json = {{"rope_type", "yarn"},
               {"factor", scaling.factor},
               {"original_max_position_embeddings", scaling.original_max_position_embeddings},
               {"beta_fast", scaling.beta_fast},
               {"beta_slow", scaling.beta_slow}};
  for (const auto& [field, value] : {std::pair("mscale", scaling.mscale),
                                     {"mscale_all_dim", scaling.mscale_all_dim},
                                     {"attention_factor", scaling.attention_factor}})
    if (value > 0.0) json[field] = value;
  return json;
}

}  // namespace

void note_not_computed(std::string& note, const JsonFields& fields, const std::string& field,
                       const std::string& rule) {
  if (!note.empty()) return;
  try {
    fields.refuse(field, rule);
  } catch (const UsageError& error) {
    note = error.what();
  }
}

void expect_text(std::string& note, const JsonFields& fields, const char* field,
                 const std::string& only) {
  if (fields.text_or(field, only) != only)
    note_not_computed(note, fields, field, concat("only \"", only, "\" is computed"));
}

void expect_zero(std::string& note, const JsonFields& fields, const char* field) {
  if (fields.number_or(field, 0.0) != 0.0)
    note_not_computed(note, fields, field, "only 0 is computed");
}

int64_t read_head_dim(const JsonFields& fields, const char* field, int64_t fallback) {
  const int64_t head_dim = fields.integer_or(field, fallback);
  if (fields.has(field) && head_dim < 1)
    fields.refuse(field,
                  "it must be at least 1; leave it out for hidden_size / num_attention_heads");
  return head_dim;
}

LlamaConfig read_decoder(const JsonFields& fields, const DecoderDefaults& defaults) {
  LlamaConfig c;
  c.vocab_size = fields.integer("vocab_size");
  c.hidden_size = fields.integer("hidden_size");
  c.num_hidden_layers = fields.integer("num_hidden_layers");
  c.num_attention_heads = fields.integer("num_attention_heads");
  c.num_key_value_heads = fields.integer_or("num_key_value_heads", c.num_attention_heads);
  c.head_dim = read_head_dim(fields, "head_dim", defaults.head_dim);
  c.intermediate_size = fields.integer(defaults.intermediate_size);
  c.attention_bias = fields.boolean_or("attention_bias", false);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  c.rms_norm_eps = fields.number_or("rms_norm_eps", defaults.rms_norm_eps);
  c.max_position_embeddings =
      fields.integer_or("max_position_embeddings", defaults.max_position_embeddings);
  c.initializer_range = fields.number_or("initializer_range", c.initializer_range);
  c.num_nextn_predict_layers = fields.integer_or("num_nextn_predict_layers", 0);
  c.mtp_loss_weight = fields.number_or("mtp_loss_weight", c.mtp_loss_weight);
  read_rope(fields, defaults, c);
  expect_text(c.not_computed, fields, "hidden_act", "silu");
  expect_zero(c.not_computed, fields, "attention_dropout");
  return c;
}

Json decoder_json(const char* model_type, const char* model_class, const LlamaConfig& c) {
  Json json = {
      {"model_type", model_type},
      {"architectures", Json::array({model_class})},
      {"vocab_size", c.vocab_size},
      {"hidden_size", c.hidden_size},
      {"num_hidden_layers", c.num_hidden_layers},
      {"num_attention_heads", c.num_attention_heads},
      {"num_key_value_heads", c.num_key_value_heads},
      {"head_dim", head_dim_of(c)},
      {"intermediate_size", c.intermediate_size},
      {"hidden_act", "silu"},
      {"attention_bias", c.attention_bias},
      {"mlp_bias", c.mlp_bias},
      {"tie_word_embeddings", c.tie_word_embeddings},
      {"rms_norm_eps", c.rms_norm_eps},
      {"rope_theta", c.rope_theta},
      {"rope_scaling", std::visit([](const auto& s) { return scaling_json(s); }, c.rope_scaling)},
      {"max_position_embeddings", c.max_position_embeddings},
      {"initializer_range", c.initializer_range}};
  if (c.num_nextn_predict_layers > 0) {
    json["num_nextn_predict_layers"] = c.num_nextn_predict_layers;
    json["mtp_loss_weight"] = c.mtp_loss_weight;
  }
  return json;
}

}  // namespace fsdp
