#include "fsdp/nn/config/config_differences.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>

#include "fsdp/nn/config/config_json.h"

namespace fsdp {

namespace {

using Json = nlohmann::ordered_json;

// The longest sequence and the chunk size change results only by rounding.
constexpr std::string_view kOfTraining[] = {"architectures",           "initializer_range",
                                            "mtp_loss_weight",         "router_aux_loss_coef",
                                            "router_bias_update_rate", "output_router_logits",
                                            "max_position_embeddings", "chunk_size"};
constexpr std::string_view kOfResults[] = {
    "rms_norm_eps",   "layer_norm_epsilon",    "rope_theta",
    "rope_scaling",   "time_step_min",         "num_experts_per_tok",
    "norm_topk_prob", "partial_rotary_factor", "n_group",
    "topk_group",     "routed_scaling_factor", "sliding_window",
    "rope_interleave"};

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string text_of(const Json& json, const std::string& field) {
  return json.contains(field) ? json[field].dump() : "none";
}

}  // namespace

std::vector<FieldDifference> differing_fields(const ModelConfig& before, const ModelConfig& now,
                                              ModelAspect aspect) {
  const Json old_json = Json::parse(config_json(before));
  const Json new_json = Json::parse(config_json(now));
  std::vector<std::string> fields;
  for (const Json* json : {&old_json, &new_json})
    for (const auto& [field, ignored] : json->items())
      if (std::find(fields.begin(), fields.end(), field) == fields.end()) fields.push_back(field);
  std::vector<FieldDifference> differences;
  for (const std::string& field : fields) {
    if (contains(kOfTraining, field)) continue;
    if (aspect == ModelAspect::kTensors && contains(kOfResults, field)) continue;
    const FieldDifference each{field, text_of(old_json, field), text_of(new_json, field)};
    if (each.before == each.now) continue;
    differences.push_back(each);
    if (field == "model_type") break;  // other differences follow from it
  }
  return differences;
}

}  // namespace fsdp
