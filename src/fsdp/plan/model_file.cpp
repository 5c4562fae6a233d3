#include "fsdp/plan/model_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/plan/architecture.h"
#include "fsdp/plan/model_catalog.h"

namespace fsdp {

namespace {

// Where a field may be left out, its default is the published model class's own.
LlamaConfig read_decoder(const JsonFields& fields) {
  LlamaConfig c;
  c.vocab_size = fields.integer("vocab_size");
  c.hidden_size = fields.integer("hidden_size");
  c.num_hidden_layers = fields.integer("num_hidden_layers");
  c.num_attention_heads = fields.integer("num_attention_heads");
  c.num_key_value_heads = fields.integer_or("num_key_value_heads", c.num_attention_heads);
  c.head_dim = fields.integer_or("head_dim", 0);
  c.intermediate_size = fields.integer("intermediate_size");
  c.attention_bias = fields.boolean_or("attention_bias", false);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  return c;
}

ModelConfig read_llama(const JsonFields& fields) { return read_decoder(fields); }

ModelConfig read_mixtral(const JsonFields& fields) {
  LlamaConfig decoder = read_decoder(fields);
  decoder.attention_bias = decoder.mlp_bias = false;  // Mixtral's class has neither option
  decoder.num_key_value_heads = fields.integer("num_key_value_heads");
  return MixtralConfig{decoder, fields.integer("num_local_experts")};
}

ModelConfig read_deepseek_v3(const JsonFields& fields) {
  DeepseekV3Config c;
  c.vocab_size = fields.integer("vocab_size");
  c.hidden_size = fields.integer("hidden_size");
  c.num_hidden_layers = fields.integer("num_hidden_layers");
  c.num_attention_heads = fields.integer("num_attention_heads");
  c.q_lora_rank = fields.integer_or("q_lora_rank", 0);
  c.kv_lora_rank = fields.integer("kv_lora_rank");
  c.qk_nope_head_dim = fields.integer("qk_nope_head_dim");
  c.qk_rope_head_dim = fields.integer("qk_rope_head_dim");
  c.v_head_dim = fields.integer("v_head_dim");
  c.intermediate_size = fields.integer("intermediate_size");
  c.moe_intermediate_size = fields.integer("moe_intermediate_size");
  c.n_routed_experts = fields.integer("n_routed_experts");
  c.n_shared_experts = fields.integer_or("n_shared_experts", 0);
  c.first_k_dense_replace = fields.integer_or("first_k_dense_replace", 0);
  c.num_nextn_predict_layers = fields.integer_or("num_nextn_predict_layers", 0);
  c.attention_bias = fields.boolean_or("attention_bias", false);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  if (fields.integer_or("moe_layer_freq", 1) != 1)
    fields.refuse("moe_layer_freq", "only 1 is supported (experts in every layer)");
  return c;
}

ModelConfig read_nemotron_h(const JsonFields& fields) {
  NemotronHConfig c;
  c.vocab_size = fields.integer("vocab_size");
  c.hidden_size = fields.integer("hidden_size");
  c.intermediate_size = fields.integer("intermediate_size");
  c.hybrid_override_pattern = fields.text("hybrid_override_pattern");
  c.mamba_num_heads = fields.integer("mamba_num_heads");
  c.mamba_head_dim = fields.integer("mamba_head_dim");
  c.n_groups = fields.integer("n_groups");
  c.ssm_state_size = fields.integer("ssm_state_size");
  c.conv_kernel = fields.integer("conv_kernel");
  c.num_attention_heads = fields.integer("num_attention_heads");
  c.num_key_value_heads = fields.integer("num_key_value_heads");
  c.head_dim = fields.integer_or("head_dim", fields.integer_or("attention_head_dim", 0));
  c.use_conv_bias = fields.boolean_or("use_conv_bias", true);
  c.use_bias = fields.boolean_or("use_bias", false);
  c.attention_bias = fields.boolean_or("attention_bias", false);
  c.mlp_bias = fields.boolean_or("mlp_bias", false);
  c.tie_word_embeddings = fields.boolean_or("tie_word_embeddings", false);
  const auto num_layers = static_cast<int64_t>(c.hybrid_override_pattern.size());
  if (fields.integer_or("num_hidden_layers", num_layers) != num_layers)
    fields.refuse("num_hidden_layers",
                  concat("hybrid_override_pattern has ", num_layers, " layers; make them agree"));
  return c;
}

// What fields say together is checked where no file is known; the error gets its file here.
template <typename Action>
auto with_source(const std::string& source, const Action& action) {
  try {
    return action();
  } catch (const UsageError& error) {
    throw UsageError(concat(source, ": ", error.what()));
  }
}

struct Reader {
  const char* model_type;
  ModelConfig (*read)(const JsonFields& fields);
};

constexpr std::array<Reader, 4> kReaders = {{
    {"llama", read_llama},
    {"mixtral", read_mixtral},
    {"deepseek_v3", read_deepseek_v3},
    {"nemotron_h", read_nemotron_h},
}};

ModelShape read_config(const JsonFields& fields, const std::string& source) {
  const std::string model_type = fields.text("model_type");
  std::vector<std::string> known;
  for (const Reader& reader : kReaders) {
    known.emplace_back(reader.model_type);
    if (reader.model_type != model_type) continue;
    const ModelConfig config = reader.read(fields);
    return with_source(source, [&] { return build_model(source, config); });
  }
  fields.refuse("model_type", concat("known are ", join(known, ", "),
                                     "; any other model can be given as a list of \"units\""));
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
  for (size_t i = 0; i < num_units; ++i) {
    const JsonFields unit_fields = fields.element("units", i);
    unit_fields.allow_only({"name", "tensors"});
    UnitShape unit{unit_fields.text("name"), {}};
    const size_t num_tensors = unit_fields.array("tensors").size();
    for (size_t t = 0; t < num_tensors; ++t)
      unit.tensors.push_back(read_tensor(unit_fields.element("tensors", t)));
    model.units.push_back(std::move(unit));
  }
  if (fields.has("uses"))
    read_uses(fields, model);
  else
    for (size_t i = 0; i < num_units; ++i) model.uses.push_back(static_cast<int64_t>(i));
  with_source(source, [&] { model.validate(); });
  return model;
}

}  // namespace

ModelShape parse_model(std::string_view json_text, const std::string& source) {
  const nlohmann::json document = parse_json(json_text, source);
  const JsonFields fields(document, source, "");
  if (fields.has("units")) return read_units(fields, source);
  if (fields.has("model_type")) return read_config(fields, source);
  fields.refuse("model_type",
                "give a config.json with \"model_type\", or a list of \"units\" of your own");
}

bool is_known_model_type(std::string_view model_type) {
  return std::any_of(kReaders.begin(), kReaders.end(),
                     [&](const Reader& reader) { return reader.model_type == model_type; });
}

ModelShape load_model_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode))
    throw UsageError(concat("model is '", path, "', which is not a file; give a JSON file or one ",
                            "of ", join(model_names(), ", ")));
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) throw UsageError(concat("model file '", path, "' cannot be read; check its rights"));
  return parse_model(text.str(), path);
}

ModelShape load_model(const std::string& name_or_path) {
  if (name_or_path.ends_with(".json") || name_or_path.find('/') != std::string::npos)
    return load_model_file(name_or_path);
  return model_by_name(name_or_path);
}

}  // namespace fsdp
