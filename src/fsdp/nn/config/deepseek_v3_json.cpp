#include "fsdp/base/json_fields.h"
#include "fsdp/nn/config/decoder_json.h"

namespace fsdp {

namespace {

using Json = nlohmann::ordered_json;

void read_latent_attention(const JsonFields& fields, DeepseekV3Config& c) {
  // Null says that queries are projected in one step.
  c.q_lora_rank = fields.is_null("q_lora_rank") ? 0 : fields.integer_or("q_lora_rank", 1536);
  c.kv_lora_rank = fields.integer_or("kv_lora_rank", c.kv_lora_rank);
  c.qk_nope_head_dim = fields.integer_or("qk_nope_head_dim", c.qk_nope_head_dim);
  c.v_head_dim = fields.integer_or("v_head_dim", c.v_head_dim);
  // The package's class, too, has it as head_dim, whatever the file says of that.
  c.decoder.head_dim = fields.integer_or("qk_rope_head_dim", 64);
  if (c.decoder.head_dim < 1) fields.refuse("qk_rope_head_dim", "it must be at least 1");
  c.rope_interleave = fields.boolean_or("rope_interleave", c.rope_interleave);
}

void read_deepseek_experts(const JsonFields& fields, DeepseekV3Config& c) {
  c.first_k_dense_replace = fields.integer_or("first_k_dense_replace", c.first_k_dense_replace);
  c.n_routed_experts = fields.integer_or("n_routed_experts", c.n_routed_experts);
  c.n_shared_experts = fields.integer_or("n_shared_experts", c.n_shared_experts);
  c.num_experts_per_tok = fields.integer_or("num_experts_per_tok", c.num_experts_per_tok);
  c.moe_intermediate_size = fields.integer_or("moe_intermediate_size", c.moe_intermediate_size);
  c.n_group = fields.integer_or("n_group", c.n_group);
  c.topk_group = fields.integer_or("topk_group", c.topk_group);
  c.norm_topk_prob = fields.boolean_or("norm_topk_prob", c.norm_topk_prob);
  c.routed_scaling_factor = fields.number_or("routed_scaling_factor", c.routed_scaling_factor);
  c.router_bias_update_rate =
      fields.number_or("router_bias_update_rate", c.router_bias_update_rate);
  c.router_aux_loss_coef = fields.number_or("router_aux_loss_coef", c.router_aux_loss_coef);
  if (fields.integer_or("moe_layer_freq", 1) != 1)
    fields.refuse("moe_layer_freq", "only 1 is supported (experts in every layer)");
}

}  // namespace

ModelConfig read_deepseek_v3(const JsonFields& fields) {
  DeepseekV3Config c;
  c.decoder = read_decoder(fields, {.max_position_embeddings = 4096});
  c.decoder.mlp_bias = false;  // no such option
  read_latent_attention(fields, c);
  read_deepseek_experts(fields, c);
  std::string& note = c.decoder.not_computed;
  expect_text(note, fields, "scoring_func", "sigmoid");
  expect_text(note, fields, "topk_method", "noaux_tc");
  if (fields.has("quantization_config"))
    note_not_computed(
        note, fields, "quantization_config",
        "weights with scales are not read; convert them to bf16 and leave the field out");
  return c;
}

nlohmann::ordered_json deepseek_v3_json(const DeepseekV3Config& c) {
  Json json = decoder_json("deepseek_v3", "DeepseekV3ForCausalLM", c.decoder);
  json.erase("mlp_bias");
  json.erase("head_dim");
  json["q_lora_rank"] = c.q_lora_rank > 0 ? Json(c.q_lora_rank) : Json(nullptr);
  json["kv_lora_rank"] = c.kv_lora_rank;
  json["qk_nope_head_dim"] = c.qk_nope_head_dim;
  json["qk_rope_head_dim"] = head_dim_of(c.decoder);
  json["v_head_dim"] = c.v_head_dim;
  json["rope_interleave"] = c.rope_interleave;
  json["first_k_dense_replace"] = c.first_k_dense_replace;
  json["n_routed_experts"] = c.n_routed_experts;
  json["n_shared_experts"] = c.n_shared_experts;
  json["num_experts_per_tok"] = c.num_experts_per_tok;
  json["moe_intermediate_size"] = c.moe_intermediate_size;
  json["scoring_func"] = "sigmoid";
  json["topk_method"] = "noaux_tc";
  json["n_group"] = c.n_group;
  json["topk_group"] = c.topk_group;
  json["norm_topk_prob"] = c.norm_topk_prob;
  json["routed_scaling_factor"] = c.routed_scaling_factor;
  json["router_bias_update_rate"] = c.router_bias_update_rate;
  json["router_aux_loss_coef"] = c.router_aux_loss_coef;
  // The package's default is 1.
  json["num_nextn_predict_layers"] = c.decoder.num_nextn_predict_layers;
  return json;
}

}  // namespace fsdp
