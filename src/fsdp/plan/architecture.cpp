#include "fsdp/plan/architecture.h"

#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// A dimension beyond this is a typing error; products of two, which is what is formed here, fit 64
// bits with room to add. Whole shapes are checked by ModelShape::validate.
constexpr int64_t kMaxDim = int64_t{1} << 24;
// Layers times experts beyond this is a typing error too; it would fill the memory with names.
constexpr int64_t kMaxBlocks = int64_t{1} << 20;

struct Field {
  const char* name;
  int64_t value;
};

void check_range(int64_t minimum, int64_t maximum, std::initializer_list<Field> fields) {
  for (const Field& field : fields)
    if (field.value < minimum || field.value > maximum)
      throw UsageError(concat(field.name, " is ", field.value, "; it must be a whole number from ",
                              minimum, " to ", maximum));
}

void check_dims(std::initializer_list<Field> fields) { check_range(1, kMaxDim, fields); }

int64_t head_dim_of(int64_t head_dim, int64_t hidden_size, int64_t num_attention_heads) {
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

void check_kv_heads(int64_t num_key_value_heads, int64_t num_attention_heads) {
  check_dims({{"num_key_value_heads", num_key_value_heads}});
  if (num_attention_heads % num_key_value_heads != 0)
    throw UsageError(concat("num_key_value_heads is ", num_key_value_heads,
                            "; it must divide num_attention_heads = ", num_attention_heads));
}

enum class Bias { kWithout, kWith };

Bias bias_if(bool with) { return with ? Bias::kWith : Bias::kWithout; }

// Collects the tensors of one unit under a common prefix.
class UnitBuilder {
 public:
  UnitBuilder(std::string unit_name, std::string prefix)
      : unit_{std::move(unit_name), {}}, prefix_(std::move(prefix)) {}

  void tensor(const std::string& name, std::vector<int64_t> shape,
              std::optional<DType> dtype = std::nullopt) {
    unit_.tensors.push_back({prefix_ + name, std::move(shape), dtype});
  }

  // y = W x (+ b): weight [out, in].
  void linear(const std::string& name, int64_t out, int64_t in, Bias bias = Bias::kWithout) {
    tensor(name + ".weight", {out, in});
    if (bias == Bias::kWith) tensor(name + ".bias", {out});
  }

  void norm(const std::string& name, int64_t dim) { tensor(name + ".weight", {dim}); }

  UnitShape finish() && { return std::move(unit_); }

 private:
  UnitShape unit_;
  std::string prefix_;
};

// Appends units in forward order, each used where it is added.
class ModelBuilder {
 public:
  explicit ModelBuilder(std::string name) { model_.name = std::move(name); }

  int64_t add(UnitBuilder&& unit) {
    const auto index = static_cast<int64_t>(model_.units.size());
    model_.units.push_back(std::move(unit).finish());
    model_.uses.push_back(index);
    return index;
  }

  void use_again(int64_t index) { model_.uses.push_back(index); }

  ModelShape finish() && {
    model_.validate();
    return std::move(model_);
  }

 private:
  ModelShape model_;
};

int64_t add_embedding(ModelBuilder& model, const std::string& tensor, int64_t vocab, int64_t dim) {
  UnitBuilder unit(tensor, tensor);
  unit.tensor(".weight", {vocab, dim});
  return model.add(std::move(unit));
}

struct Head {
  std::string norm;
  int64_t vocab_size;
  int64_t hidden_size;
  bool tied;
};

// The units that a second pass over the head (MTP) uses: the embedding when tied, else the head.
int64_t add_head(ModelBuilder& model, const Head& head, int64_t embedding) {
  UnitBuilder unit(head.tied ? head.norm : "lm_head", "");
  unit.norm(head.norm, head.hidden_size);
  if (!head.tied) unit.linear("lm_head", head.vocab_size, head.hidden_size);
  const int64_t index = model.add(std::move(unit));
  if (!head.tied) return index;
  model.use_again(embedding);
  return embedding;
}

std::string layer_name(const char* stack, int64_t layer) {
  return concat(stack, ".layers.", layer);
}

struct Attention {
  int64_t hidden_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  Bias bias;
};

void add_attention(UnitBuilder& unit, const std::string& prefix, const Attention& a) {
  unit.linear(prefix + ".q_proj", a.num_heads * a.head_dim, a.hidden_size, a.bias);
  unit.linear(prefix + ".k_proj", a.num_kv_heads * a.head_dim, a.hidden_size, a.bias);
  unit.linear(prefix + ".v_proj", a.num_kv_heads * a.head_dim, a.hidden_size, a.bias);
  unit.linear(prefix + ".o_proj", a.hidden_size, a.num_heads * a.head_dim, a.bias);
}

void add_gated_mlp(UnitBuilder& unit, const std::string& prefix, int64_t dim, int64_t inner,
                   Bias bias = Bias::kWithout) {
  unit.linear(prefix + ".gate_proj", inner, dim, bias);
  unit.linear(prefix + ".up_proj", inner, dim, bias);
  unit.linear(prefix + ".down_proj", dim, inner, bias);
}

void add_mixtral_experts(UnitBuilder& unit, const LlamaConfig& c, int64_t num_experts) {
  unit.linear("block_sparse_moe.gate", num_experts, c.hidden_size);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const std::string prefix = concat("block_sparse_moe.experts.", expert);
    unit.linear(prefix + ".w1", c.intermediate_size, c.hidden_size);
    unit.linear(prefix + ".w2", c.hidden_size, c.intermediate_size);
    unit.linear(prefix + ".w3", c.intermediate_size, c.hidden_size);
  }
}

// Llama and Mixtral differ in the MLP only; num_experts = 0 is the dense one.
ModelShape build_llama(std::string name, const LlamaConfig& c, int64_t num_experts) {
  check_dims({{"vocab_size", c.vocab_size}, {"intermediate_size", c.intermediate_size}});
  check_range(1, kMaxBlocks, {{"num_hidden_layers", c.num_hidden_layers}});
  const int64_t head_dim = head_dim_of(c.head_dim, c.hidden_size, c.num_attention_heads);
  check_kv_heads(c.num_key_value_heads, c.num_attention_heads);

  ModelBuilder model(std::move(name));
  const int64_t embedding = add_embedding(model, "model.embed_tokens", c.vocab_size, c.hidden_size);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    unit.norm("input_layernorm", c.hidden_size);
    add_attention(unit, "self_attn",
                  {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim,
                   bias_if(c.attention_bias)});
    unit.norm("post_attention_layernorm", c.hidden_size);
    if (num_experts > 0)
      add_mixtral_experts(unit, c, num_experts);
    else
      add_gated_mlp(unit, "mlp", c.hidden_size, c.intermediate_size, bias_if(c.mlp_bias));
    model.add(std::move(unit));
  }
  add_head(model, {"model.norm", c.vocab_size, c.hidden_size, c.tie_word_embeddings}, embedding);
  return std::move(model).finish();
}

void check_expert_count(const char* field, int64_t num_experts, int64_t num_layers) {
  check_dims({{field, num_experts}});
  if (num_experts > kMaxBlocks / num_layers)
    throw UsageError(concat(field, " is ", num_experts, " in ", num_layers, " layers; at most ",
                            kMaxBlocks, " experts in all are supported"));
}

ModelShape build(std::string name, const LlamaConfig& c) {
  return build_llama(std::move(name), c, 0);
}

ModelShape build(std::string name, const MixtralConfig& c) {
  check_range(1, kMaxBlocks, {{"num_hidden_layers", c.decoder.num_hidden_layers}});
  check_expert_count("num_local_experts", c.num_local_experts, c.decoder.num_hidden_layers);
  return build_llama(std::move(name), c.decoder, c.num_local_experts);
}

void add_latent_attention(UnitBuilder& unit, const DeepseekV3Config& c) {
  const int64_t qk_head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
  const int64_t queries = c.num_attention_heads * qk_head_dim;
  const Bias bias = bias_if(c.attention_bias);
  if (c.q_lora_rank == 0) {
    unit.linear("self_attn.q_proj", queries, c.hidden_size);
  } else {
    unit.linear("self_attn.q_a_proj", c.q_lora_rank, c.hidden_size, bias);
    unit.norm("self_attn.q_a_layernorm", c.q_lora_rank);
    unit.linear("self_attn.q_b_proj", queries, c.q_lora_rank);
  }
  unit.linear("self_attn.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size,
              bias);
  unit.norm("self_attn.kv_a_layernorm", c.kv_lora_rank);
  unit.linear("self_attn.kv_b_proj", c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
              c.kv_lora_rank);
  unit.linear("self_attn.o_proj", c.hidden_size, c.num_attention_heads * c.v_head_dim, bias);
}

void add_deepseek_experts(UnitBuilder& unit, const DeepseekV3Config& c) {
  unit.linear("mlp.gate", c.n_routed_experts, c.hidden_size);
  // The published checkpoint keeps this one in fp32.
  unit.tensor("mlp.gate.e_score_correction_bias", {c.n_routed_experts}, DType::kFloat32);
  for (int64_t expert = 0; expert < c.n_routed_experts; ++expert)
    add_gated_mlp(unit, concat("mlp.experts.", expert), c.hidden_size, c.moe_intermediate_size);
  if (c.n_shared_experts > 0)
    add_gated_mlp(unit, "mlp.shared_experts", c.hidden_size,
                  c.n_shared_experts * c.moe_intermediate_size);
}

void add_deepseek_block(UnitBuilder& unit, const DeepseekV3Config& c, int64_t layer) {
  unit.norm("input_layernorm", c.hidden_size);
  add_latent_attention(unit, c);
  unit.norm("post_attention_layernorm", c.hidden_size);
  if (layer < c.first_k_dense_replace)
    add_gated_mlp(unit, "mlp", c.hidden_size, c.intermediate_size);
  else
    add_deepseek_experts(unit, c);
}

void validate(const DeepseekV3Config& c) {
  check_dims({{"vocab_size", c.vocab_size},
              {"hidden_size", c.hidden_size},
              {"num_attention_heads", c.num_attention_heads},
              {"kv_lora_rank", c.kv_lora_rank},
              {"qk_nope_head_dim", c.qk_nope_head_dim},
              {"qk_rope_head_dim", c.qk_rope_head_dim},
              {"v_head_dim", c.v_head_dim},
              {"intermediate_size", c.intermediate_size},
              {"moe_intermediate_size", c.moe_intermediate_size}});
  check_range(1, kMaxBlocks, {{"num_hidden_layers", c.num_hidden_layers}});
  check_range(0, kMaxDim,
              {{"q_lora_rank", c.q_lora_rank}, {"n_shared_experts", c.n_shared_experts}});
  check_range(0, c.num_hidden_layers, {{"first_k_dense_replace", c.first_k_dense_replace}});
  check_range(0, kMaxBlocks, {{"num_nextn_predict_layers", c.num_nextn_predict_layers}});
  check_expert_count("n_routed_experts", c.n_routed_experts,
                     c.num_hidden_layers + c.num_nextn_predict_layers);
}

// Layers after the main ones, as the published checkpoint numbers them. Each embeds the shifted
// tokens, joins them with the hidden state, runs one block and ends in the main model's head.
void add_prediction_module(ModelBuilder& model, const DeepseekV3Config& c, int64_t layer,
                           std::pair<int64_t, int64_t> embedding_and_head) {
  model.use_again(embedding_and_head.first);
  const std::string block = layer_name("model", layer);
  UnitBuilder unit(block, block + ".");
  unit.norm("enorm", c.hidden_size);
  unit.norm("hnorm", c.hidden_size);
  unit.linear("eh_proj", c.hidden_size, 2 * c.hidden_size);
  add_deepseek_block(unit, c, layer);
  unit.norm("shared_head.norm", c.hidden_size);
  model.add(std::move(unit));
  model.use_again(embedding_and_head.second);
}

ModelShape build(std::string name, const DeepseekV3Config& c) {
  validate(c);
  ModelBuilder model(std::move(name));
  const int64_t embedding = add_embedding(model, "model.embed_tokens", c.vocab_size, c.hidden_size);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    add_deepseek_block(unit, c, layer);
    model.add(std::move(unit));
  }
  const int64_t head = add_head(
      model, {"model.norm", c.vocab_size, c.hidden_size, c.tie_word_embeddings}, embedding);
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i)
    add_prediction_module(model, c, c.num_hidden_layers + i, {embedding, head});
  return std::move(model).finish();
}

void add_mamba(UnitBuilder& unit, const NemotronHConfig& c) {
  const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
  const int64_t convolved = inner + 2 * c.n_groups * c.ssm_state_size;  // x, B and C
  const Bias bias = bias_if(c.use_bias);
  unit.linear("mixer.in_proj", inner + convolved + c.mamba_num_heads, c.hidden_size, bias);
  unit.tensor("mixer.conv1d.weight", {convolved, 1, c.conv_kernel});
  if (c.use_conv_bias) unit.tensor("mixer.conv1d.bias", {convolved});
  for (const char* per_head : {"mixer.A_log", "mixer.D", "mixer.dt_bias"})
    unit.tensor(per_head, {c.mamba_num_heads});
  unit.norm("mixer.norm", inner);
  unit.linear("mixer.out_proj", c.hidden_size, inner, bias);
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
  for (const char layer : c.hybrid_override_pattern)
    if (layer != 'M' && layer != '-' && layer != '*')
      throw UsageError(concat("hybrid_override_pattern contains '", layer,
                              "'; the known layers are M (Mamba-2), - (MLP) and * (attention)"));
}

ModelShape build(std::string name, const NemotronHConfig& c) {
  validate(c);
  const int64_t head_dim = head_dim_of(c.head_dim, c.hidden_size, c.num_attention_heads);
  check_kv_heads(c.num_key_value_heads, c.num_attention_heads);
  ModelBuilder model(std::move(name));
  const int64_t embedding =
      add_embedding(model, "backbone.embeddings", c.vocab_size, c.hidden_size);
  for (size_t layer = 0; layer < c.hybrid_override_pattern.size(); ++layer) {
    const std::string block = layer_name("backbone", static_cast<int64_t>(layer));
    UnitBuilder unit(block, block + ".");
    unit.norm("norm", c.hidden_size);
    if (c.hybrid_override_pattern[layer] == 'M') {
      add_mamba(unit, c);
    } else if (c.hybrid_override_pattern[layer] == '*') {
      add_attention(unit, "mixer",
                    {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim,
                     bias_if(c.attention_bias)});
    } else {
      unit.linear("mixer.up_proj", c.intermediate_size, c.hidden_size, bias_if(c.mlp_bias));
      unit.linear("mixer.down_proj", c.hidden_size, c.intermediate_size, bias_if(c.mlp_bias));
    }
    model.add(std::move(unit));
  }
  add_head(model, {"backbone.norm_f", c.vocab_size, c.hidden_size, c.tie_word_embeddings},
           embedding);
  return std::move(model).finish();
}

}  // namespace

ModelShape build_model(std::string name, const ModelConfig& config) {
  return std::visit([&](const auto& c) { return build(std::move(name), c); }, config);
}

}  // namespace fsdp
