#include <array>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/decoder_json.h"

namespace fsdp {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<const char*, LayerType>, 2> kLayerTypes = {
    {{"linear_attention", LayerType::kLinearAttention},
     {"full_attention", LayerType::kFullAttention}}};

LayerType read_layer_type(const JsonFields& fields, const nlohmann::json& layer) {
  for (const auto& [word, type] : kLayerTypes)
    if (layer == word) return type;
  fields.refuse("layer_types", "the known layers are linear_attention and full_attention");
}

// A list of words, or how often attention comes. Always the list, so that configurations that mean
// the same are the same.
std::vector<LayerType> read_layer_types(const JsonFields& fields, int64_t num_layers) {
  std::vector<LayerType> types;
  if (fields.has("layer_types")) {
    for (const nlohmann::json& layer : fields.array("layer_types"))
      types.push_back(read_layer_type(fields, layer));
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

}  // namespace

// The layers of multi-token prediction that published checkpoints have beside the model ("mtp.")
// are in no field, and the package leaves them out, too.
ModelConfig read_qwen3_next(const JsonFields& fields) {
  Qwen3NextConfig c;
  c.decoder = read_decoder(
      fields, {.max_position_embeddings = 32768, .head_dim = 256, .has_partial_rotary = true});
  c.decoder.mlp_bias = false;  // no such option
  if (c.decoder.num_nextn_predict_layers != 0)
    note_not_computed(c.decoder.not_computed, fields, "num_nextn_predict_layers",
                      "only 0 is computed");
  c.decoder.num_nextn_predict_layers = 0;
  c.partial_rotary_factor = read_partial_rotary_factor(fields);
  c.layer_types = read_layer_types(fields, c.decoder.num_hidden_layers);
  c.linear_num_key_heads = fields.integer_or("linear_num_key_heads", c.linear_num_key_heads);
  c.linear_num_value_heads = fields.integer_or("linear_num_value_heads", c.linear_num_value_heads);
  c.linear_key_head_dim = fields.integer_or("linear_key_head_dim", c.linear_key_head_dim);
  c.linear_value_head_dim = fields.integer_or("linear_value_head_dim", c.linear_value_head_dim);
  c.linear_conv_kernel_dim = fields.integer_or("linear_conv_kernel_dim", c.linear_conv_kernel_dim);
  c.num_experts = fields.integer_or("num_experts", c.num_experts);
  c.num_experts_per_tok = fields.integer_or("num_experts_per_tok", c.num_experts_per_tok);
  c.moe_intermediate_size = fields.integer_or("moe_intermediate_size", c.moe_intermediate_size);
  c.shared_expert_intermediate_size =
      fields.integer_or("shared_expert_intermediate_size", c.shared_expert_intermediate_size);
  c.norm_topk_prob = fields.boolean_or("norm_topk_prob", c.norm_topk_prob);
  c.router_aux_loss_coef = fields.number_or("router_aux_loss_coef", c.router_aux_loss_coef);
  c.decoder_sparse_step = fields.integer_or("decoder_sparse_step", c.decoder_sparse_step);
  c.mlp_only_layers = read_dense_layers(fields);
  return c;
}

nlohmann::ordered_json qwen3_next_json(const Qwen3NextConfig& c) {
  Json json = decoder_json("qwen3_next", "Qwen3NextForCausalLM", c.decoder);
  json.erase("mlp_bias");
  json["partial_rotary_factor"] = c.partial_rotary_factor;
  json["layer_types"] = Json::array();
  for (int64_t layer = 0; layer < c.decoder.num_hidden_layers; ++layer)
    for (const auto& [word, type] : kLayerTypes)
      if (type == layer_type_of(c, layer)) json["layer_types"].push_back(word);
  json["linear_num_key_heads"] = c.linear_num_key_heads;
  json["linear_num_value_heads"] = c.linear_num_value_heads;
  json["linear_key_head_dim"] = c.linear_key_head_dim;
  json["linear_value_head_dim"] = c.linear_value_head_dim;
  json["linear_conv_kernel_dim"] = c.linear_conv_kernel_dim;
  json["num_experts"] = c.num_experts;
  json["num_experts_per_tok"] = c.num_experts_per_tok;
  json["moe_intermediate_size"] = c.moe_intermediate_size;
  json["shared_expert_intermediate_size"] = c.shared_expert_intermediate_size;
  json["norm_topk_prob"] = c.norm_topk_prob;
  json["decoder_sparse_step"] = c.decoder_sparse_step;
  json["mlp_only_layers"] = c.mlp_only_layers;
  json["router_aux_loss_coef"] = c.router_aux_loss_coef;
  json["output_router_logits"] = true;
  return json;
}

}  // namespace fsdp
