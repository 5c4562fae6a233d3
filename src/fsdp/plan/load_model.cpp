#include "fsdp/plan/load_model.h"

#include <algorithm>
#include <array>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/model_tensors.h"

namespace fsdp {

namespace {

struct PublishedModel {
  const char* name;
  ModelConfig config;
};

// The numbers of the published configurations. What can be trained by name can be planned, too.
const std::array<PublishedModel, 8>& published() {
  static const std::array<PublishedModel, 8> kPublished = {{
      {"llama3-8b", LlamaConfig{.vocab_size = 128256,
                                .hidden_size = 4096,
                                .num_hidden_layers = 32,
                                .num_attention_heads = 32,
                                .num_key_value_heads = 8,
                                .intermediate_size = 14336}},
      {"llama3-70b", LlamaConfig{.vocab_size = 128256,
                                 .hidden_size = 8192,
                                 .num_hidden_layers = 80,
                                 .num_attention_heads = 64,
                                 .num_key_value_heads = 8,
                                 .intermediate_size = 28672}},
      {"mixtral-8x7b", MixtralConfig{.decoder = {.vocab_size = 32000,
                                                 .hidden_size = 4096,
                                                 .num_hidden_layers = 32,
                                                 .num_attention_heads = 32,
                                                 .num_key_value_heads = 8,
                                                 .intermediate_size = 14336},
                                     .num_local_experts = 8}},
      {"qwen3-30b-a3b", MixtralConfig{.decoder = {.vocab_size = 151936,
                                                  .hidden_size = 2048,
                                                  .num_hidden_layers = 48,
                                                  .num_attention_heads = 32,
                                                  .num_key_value_heads = 4,
                                                  .head_dim = 128,
                                                  .intermediate_size = 768,
                                                  .qk_norm = true},
                                      .num_local_experts = 128,
                                      .num_experts_per_tok = 8}},
      // Where nothing is said, the struct's defaults are the published numbers.
      {"qwen3-next-80b-a3b", Qwen3NextConfig{.decoder = {.vocab_size = 151936,
                                                         .hidden_size = 2048,
                                                         .num_hidden_layers = 48,
                                                         .num_attention_heads = 16,
                                                         .num_key_value_heads = 2,
                                                         .head_dim = 256,
                                                         .intermediate_size = 5632}}},
      {"deepseek-v3", DeepseekV3Config{.decoder = {.vocab_size = 129280,
                                                   .hidden_size = 7168,
                                                   .num_hidden_layers = 61,
                                                   .num_attention_heads = 128,
                                                   .num_key_value_heads = 128,
                                                   .head_dim = 64,
                                                   .intermediate_size = 18432,
                                                   .num_nextn_predict_layers = 1},
                                       .q_lora_rank = 1536}},
      {"nemotron-h-8b", NemotronHConfig{.vocab_size = 131072,
                                        .hidden_size = 4096,
                                        .intermediate_size = 21504,
                                        .hybrid_override_pattern =
                                            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                                        .mamba_num_heads = 128,
                                        .mamba_head_dim = 64,
                                        .n_groups = 8,
                                        .ssm_state_size = 128,
                                        .conv_kernel = 4,
                                        .num_attention_heads = 32,
                                        .num_key_value_heads = 8,
                                        .head_dim = 128}},
      {"nemotron-3-nano-30b-a3b",
       NemotronHConfig{
           .vocab_size = 131072,
           .hidden_size = 2688,
           .intermediate_size = 1856,
           .hybrid_override_pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
           .mamba_num_heads = 64,
           .mamba_head_dim = 64,
           .n_groups = 8,
           .ssm_state_size = 128,
           .conv_kernel = 4,
           .num_attention_heads = 32,
           .num_key_value_heads = 2,
           .head_dim = 128,
           .n_routed_experts = 128,
           .num_experts_per_tok = 6,
           .moe_intermediate_size = 1856,
           .moe_shared_expert_intermediate_size = 3712,
           .routed_scaling_factor = 2.5}},
  }};
  return kPublished;
}

// Fields are checked against each other by build_model(), which knows no file; adds it to the
// error.
template <typename Action>
auto with_source(const std::string& source, const Action& action) {
  try {
    return action();
  } catch (const UsageError& error) {
    throw UsageError(concat(source, ": ", error.what()));
  }
}

ModelShape read_config(const JsonFields& fields, const std::string& source) {
  const std::string model_type = fields.text("model_type");
  if (!is_known_model_type(model_type))
    fields.refuse("model_type", concat("known are ", join(known_model_types(), ", "),
                                       "; any other model can be given as a list of \"units\""));
  const ModelConfig config = read_model_config(fields);
  return with_source(source, [&] { return build_model(source, config); });
}

TensorShape read_tensor(const JsonFields& fields) {
  fields.allow_only({"name", "shape", "dtype"});
  TensorShape tensor{fields.text("name"), {}, {}};
  for (const nlohmann::json& dim : fields.array("shape")) {
    // Numbers without a sign are what the parser calls unsigned.
    if (!dim.is_number_unsigned() || dim.get<uint64_t>() > uint64_t{INT64_MAX})
      fields.refuse("shape", "it must be a list of whole numbers from 0 up");
    tensor.shape.push_back(dim.get<int64_t>());
  }
  if (fields.has("dtype")) {
    tensor.dtype = parse_dtype(fields.text("dtype"));
    std::vector<std::string> names;
    for (const DType dtype : all_dtypes()) names.emplace_back(name_of(dtype));
    if (!tensor.dtype) fields.refuse("dtype", concat("use one of ", join(names, ", ")));
  }
  return tensor;
}

// More units would take minutes to plan; no model has nearly as many.
constexpr size_t kMaxUnits = 8192;

void check_count(const char* field, size_t count, const std::string& source) {
  if (count > kMaxUnits)
    throw UsageError(concat(source, ": ", field, " has ", count, " entries; at most ", kMaxUnits,
                            " are supported, so join neighbouring units"));
}

void read_uses(const JsonFields& fields, ModelShape& model) {
  for (const nlohmann::json& use : fields.array("uses")) {
    const std::string name = use.is_string() ? use.get<std::string>() : "";
    const auto unit = std::find_if(model.units.begin(), model.units.end(),
                                   [&](const UnitShape& u) { return u.name == name; });
    if (unit == model.units.end())
      fields.refuse("uses", concat(use.dump(), " is not the name of a unit"));
    model.uses.push_back(unit - model.units.begin());
  }
}

ModelShape read_units(const JsonFields& fields, const std::string& source) {
  fields.allow_only({"name", "units", "uses"});
  ModelShape model{fields.text_or("name", source), {}, {}};
  const size_t num_units = fields.array("units").size();
  check_count("units", num_units, source);
  for (size_t i = 0; i < num_units; ++i) {
    const JsonFields unit_fields = fields.element("units", i);
    unit_fields.allow_only({"name", "tensors"});
    UnitShape unit{unit_fields.text("name"), {}};
    const size_t num_tensors = unit_fields.array("tensors").size();
    for (size_t t = 0; t < num_tensors; ++t)
      unit.tensors.push_back(read_tensor(unit_fields.element("tensors", t)));
    model.units.push_back(std::move(unit));
  }
  if (fields.has("uses")) {
    check_count("uses", fields.array("uses").size(), source);
    read_uses(fields, model);
  } else {
    for (size_t i = 0; i < num_units; ++i) model.uses.push_back(static_cast<int64_t>(i));
  }
  with_source(source, [&] { model.validate(); });
  return model;
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const PublishedModel& entry : published()) names.emplace_back(entry.name);
  for (const ModelPreset& preset : model_presets()) names.emplace_back(preset.name);
  return names;
}

ModelShape model_by_name(std::string_view name) {
  for (const PublishedModel& entry : published())
    if (entry.name == name) return build_model(entry.name, entry.config);
  if (const ModelPreset* preset = find_preset(name))
    return build_model(preset->name, preset->config);
  const std::vector<std::string> names = model_names();
  const std::string near = nearest(name, names);
  throw UsageError(concat("model is '", name, "', which is not known; ",
                          near.empty() ? "the" : concat("did you mean '", near, "'? The"),
                          " known models are ", join(names, ", ")));
}

ModelShape parse_model(std::string_view json_text, const std::string& source) {
  const nlohmann::json document = parse_json(json_text, source);
  const JsonFields fields(document, source, "");
  if (fields.has("units")) return read_units(fields, source);
  if (fields.has("model_type")) return read_config(fields, source);
  fields.refuse("model_type",
                "give a config.json with \"model_type\", or a list of \"units\" of your own");
}

bool is_known_model_type(std::string_view model_type) {
  const std::vector<std::string> types = known_model_types();
  return std::find(types.begin(), types.end(), model_type) != types.end();
}

std::string config_path(const std::string& name_or_path) {
  if (is_directory(name_or_path)) return name_or_path + "/config.json";
  const bool is_path =
      name_or_path.ends_with(".json") || name_or_path.find('/') != std::string::npos;
  return is_path ? name_or_path : "";
}

ModelShape load_model(const std::string& name_or_path) {
  constexpr int64_t kMaxBytes = int64_t{64} << 20;
  const std::string path = config_path(name_or_path);
  if (path.empty()) return model_by_name(name_or_path);
  if (!is_regular_file(path))
    throw UsageError(concat("model is '", name_or_path, "', but there is no file '", path,
                            "'; give a JSON file, a directory with a config.json, or one of ",
                            join(model_names(), ", ")));
  return parse_model(read_text_file(path, kMaxBytes), path);
}

}  // namespace fsdp
