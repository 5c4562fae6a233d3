#include "fsdp/plan/model_tensors.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp {

namespace {

enum class Bias { kWithout, kWith };

// The dim of a matrix that the ranks of a tp group share, and in how many parts: the layers' own
// cuts (nn/layers/matrix_layers.h).
struct LinearCut {
  enum class Of : uint8_t { kNothing, kOutputs, kInputs } of = Of::kNothing;
  int64_t num_parts = 0;

  std::optional<TpCut> of_weight() const {
    if (of == Of::kNothing) return std::nullopt;
    return TpCut{.dim = of == Of::kOutputs ? 0 : 1, .num_parts = num_parts};
  }
  std::optional<TpCut> of_bias() const {
    if (of != Of::kOutputs) return std::nullopt;
    return TpCut{.dim = 0, .num_parts = num_parts};
  }
};

LinearCut by_outputs(int64_t num_parts) { return {LinearCut::Of::kOutputs, num_parts}; }
LinearCut by_inputs(int64_t num_parts) { return {LinearCut::Of::kInputs, num_parts}; }

Bias bias_if(bool with) { return with ? Bias::kWith : Bias::kWithout; }

// Collects the tensors of one unit under a common prefix.
class UnitBuilder {
 public:
  UnitBuilder(std::string unit_name, std::string prefix)
      : unit_{std::move(unit_name), {}}, prefix_(std::move(prefix)) {}

  void tensor(const std::string& name, std::vector<int64_t> shape,
              std::optional<DType> dtype = std::nullopt) {
    unit_.tensors.push_back({.name = prefix_ + name, .shape = std::move(shape), .dtype = dtype});
  }

  void experts(StackedExperts stack) {
    for (std::string& part : stack.parts) part = prefix_ + part;
    unit_.tensors.push_back({.name = prefix_ + stack.name,
                             .shape = std::move(stack.shape),
                             .num_experts = stack.num_experts,
                             .parts = std::move(stack.parts)});
  }

  // y = W x (+ b): weight [out, in].
  void linear(const std::string& name, int64_t out, int64_t in, Bias bias = Bias::kWithout,
              const LinearCut& cut = {}) {
    tensor(name + ".weight", {out, in});
    unit_.tensors.back().cut = cut.of_weight();
    if (bias == Bias::kWithout) return;
    tensor(name + ".bias", {out});
    unit_.tensors.back().cut = cut.of_bias();
  }

  // Rows of the vocabulary, which ranks share if they can.
  void vocabulary(const std::string& name, int64_t vocab_size, int64_t hidden_size) {
    tensor(name, {vocab_size, hidden_size});
    unit_.tensors.back().cut = TpCut{.dim = 0, .num_parts = vocab_size, .whole_if_uneven = true};
  }

  void norm(const std::string& name, int64_t dim) { tensor(name + ".weight", {dim}); }

  UnitShape build() && { return std::move(unit_); }

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
    model_.units.push_back(std::move(unit).build());
    model_.uses.push_back(index);
    return index;
  }

  void use_again(int64_t index) { model_.uses.push_back(index); }

  // Every tensor that tp ranks share says so.
  void takes_tp() { model_.takes_tp = true; }

  ModelShape build() && {
    model_.validate();
    return std::move(model_);
  }

 private:
  ModelShape model_;
};

int64_t add_embedding(ModelBuilder& model, const std::string& tensor, int64_t vocab, int64_t dim) {
  UnitBuilder unit(tensor, tensor);
  unit.vocabulary(".weight", vocab, dim);
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
  UnitBuilder unit("lm_head", "");
  if (!head.tied) unit.vocabulary("lm_head.weight", head.vocab_size, head.hidden_size);
  unit.norm(head.norm, head.hidden_size);
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
  bool qk_norm = false;
};

void add_attention(UnitBuilder& unit, const std::string& prefix, const Attention& a) {
  unit.linear(prefix + ".q_proj", a.num_heads * a.head_dim, a.hidden_size, a.bias,
              by_outputs(a.num_heads));
  for (const char* projection : {".k_proj", ".v_proj"})
    unit.linear(prefix + projection, a.num_kv_heads * a.head_dim, a.hidden_size, a.bias,
                by_outputs(a.num_kv_heads));
  unit.linear(prefix + ".o_proj", a.hidden_size, a.num_heads * a.head_dim, a.bias,
              by_inputs(a.num_heads));
  if (!a.qk_norm) return;
  unit.norm(prefix + ".q_norm", a.head_dim);
  unit.norm(prefix + ".k_norm", a.head_dim);
}

void add_gated_mlp(UnitBuilder& unit, const std::string& prefix, int64_t dim, int64_t inner,
                   Bias bias = Bias::kWithout) {
  for (const char* projection : {".gate_proj", ".up_proj"})
    unit.linear(prefix + projection, inner, dim, bias, by_outputs(inner));
  unit.linear(prefix + ".down_proj", dim, inner, bias, by_inputs(inner));
}

// Whole on every rank of a tp group, as experts are: each has tokens of its own.
void add_shared_expert(UnitBuilder& unit, const std::string& prefix, int64_t dim, int64_t inner) {
  for (const char* projection : {".gate_proj", ".up_proj"})
    unit.linear(prefix + projection, inner, dim);
  unit.linear(prefix + ".down_proj", dim, inner);
}

void add_mixtral_experts(UnitBuilder& unit, const MixtralConfig& c) {
  const std::string module = experts_module(c);
  unit.linear(module + ".gate", c.num_local_experts, c.decoder.hidden_size);
  for (StackedExperts& stack : stacked_experts(expert_names(c))) unit.experts(std::move(stack));
  if (c.shared_expert_intermediate_size > 0)
    add_shared_expert(unit, module + ".shared_expert", c.decoder.hidden_size,
                      c.shared_expert_intermediate_size);
}

// `experts`: nullptr for a dense MLP.
void add_llama_block(UnitBuilder& unit, const LlamaConfig& c, const MixtralConfig* experts) {
  unit.norm("input_layernorm", c.hidden_size);
  add_attention(unit, "self_attn",
                {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c),
                 bias_if(c.attention_bias), c.qk_norm});
  unit.norm("post_attention_layernorm", c.hidden_size);
  if (experts != nullptr)
    add_mixtral_experts(unit, *experts);
  else
    add_gated_mlp(unit, "mlp", c.hidden_size, c.intermediate_size, bias_if(c.mlp_bias));
}

// The units that multi-token prediction uses once more.
struct SharedUnits {
  int64_t embedding;
  int64_t head;
};

// Layers after the main ones, as the published checkpoints number them. Each embeds the shifted
// tokens, joins them with the hidden state, runs one block and ends in the main model's head.
template <typename Config, typename AddBlock>
void add_prediction_layers(ModelBuilder& model, const Config& c, const SharedUnits& shared,
                           const AddBlock& add_block) {
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
    model.use_again(shared.embedding);
    const int64_t layer = c.num_hidden_layers + i;
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    unit.norm("enorm", c.hidden_size);
    unit.norm("hnorm", c.hidden_size);
    unit.linear("eh_proj", c.hidden_size, 2 * c.hidden_size);
    add_block(unit, layer);
    unit.norm("shared_head.norm", c.hidden_size);
    model.add(std::move(unit));
    model.use_again(shared.head);
  }
}

// Llama and Mixtral differ in the MLP only.
ModelShape build_llama(std::string name, const LlamaConfig& c, const MixtralConfig* experts) {
  ModelBuilder model(std::move(name));
  model.takes_tp();
  const int64_t embedding = add_embedding(model, "model.embed_tokens", c.vocab_size, c.hidden_size);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    add_llama_block(unit, c, experts);
    model.add(std::move(unit));
  }
  const int64_t head = add_head(
      model, {"model.norm", c.vocab_size, c.hidden_size, c.tie_word_embeddings}, embedding);
  add_prediction_layers(model, c, {embedding, head},
                        [&](UnitBuilder& unit, int64_t) { add_llama_block(unit, c, experts); });
  return std::move(model).build();
}

ModelShape build(std::string name, const LlamaConfig& c) {
  validate(c);
  ModelShape model = build_llama(std::move(name), c, nullptr);
  if (c.num_nextn_predict_layers == 0) model.layers = c;
  return model;
}

ModelShape build(std::string name, const MixtralConfig& c) {
  validate(c);
  return build_llama(std::move(name), c.decoder, &c);
}

void add_latent_attention(UnitBuilder& unit, const DeepseekV3Config& c) {
  const int64_t qk_head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
  const int64_t queries = c.num_attention_heads * qk_head_dim;
  const Bias bias = bias_if(c.attention_bias);
  const LinearCut heads = by_outputs(c.num_attention_heads);
  if (c.q_lora_rank == 0) {
    unit.linear("self_attn.q_proj", queries, c.hidden_size, Bias::kWithout, heads);
  } else {
    unit.linear("self_attn.q_a_proj", c.q_lora_rank, c.hidden_size, bias);
    unit.norm("self_attn.q_a_layernorm", c.q_lora_rank);
    unit.linear("self_attn.q_b_proj", queries, c.q_lora_rank, Bias::kWithout, heads);
  }
  unit.linear("self_attn.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size,
              bias);
  unit.norm("self_attn.kv_a_layernorm", c.kv_lora_rank);
  unit.linear("self_attn.kv_b_proj", c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
              c.kv_lora_rank, Bias::kWithout, heads);
  unit.linear("self_attn.o_proj", c.hidden_size, c.num_attention_heads * c.v_head_dim, bias,
              by_inputs(c.num_attention_heads));
}

void add_deepseek_experts(UnitBuilder& unit, const DeepseekV3Config& c) {
  unit.linear("mlp.gate", c.n_routed_experts, c.hidden_size);
  // The published checkpoint keeps this one in fp32.
  unit.tensor("mlp.gate.e_score_correction_bias", {c.n_routed_experts}, DType::kFloat32);
  for (StackedExperts& stack : stacked_experts({.module = "mlp.experts",
                               .projections = {"gate_proj", "up_proj", "down_proj"},
                               .num_experts = c.n_routed_experts,
                               .hidden_size = c.hidden_size,
                               .intermediate_size = c.moe_intermediate_size}))
    unit.experts(std::move(stack));
  if (c.n_shared_experts > 0)
    add_shared_expert(unit, "mlp.shared_experts", c.hidden_size,
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
  check_layers(c.num_hidden_layers, c.num_nextn_predict_layers);
  check_range(0, kMaxDim,
              {{"q_lora_rank", c.q_lora_rank}, {"n_shared_experts", c.n_shared_experts}});
  check_range(0, c.num_hidden_layers, {{"first_k_dense_replace", c.first_k_dense_replace}});
  check_expert_count("n_routed_experts", c.n_routed_experts,
                     c.num_hidden_layers + c.num_nextn_predict_layers);
}

ModelShape build(std::string name, const DeepseekV3Config& c) {
  validate(c);
  ModelBuilder model(std::move(name));
  model.takes_tp();
  const int64_t embedding = add_embedding(model, "model.embed_tokens", c.vocab_size, c.hidden_size);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    add_deepseek_block(unit, c, layer);
    model.add(std::move(unit));
  }
  const int64_t head = add_head(
      model, {"model.norm", c.vocab_size, c.hidden_size, c.tie_word_embeddings}, embedding);
  add_prediction_layers(model, c, {embedding, head}, [&](UnitBuilder& unit, int64_t layer) {
    add_deepseek_block(unit, c, layer);
  });
  return std::move(model).build();
}

void add_mamba(UnitBuilder& unit, const NemotronHConfig& c) {
  const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
  const int64_t convolved = inner + 2 * c.n_groups * c.ssm_state_size;  // x, B and C
  const Bias bias = bias_if(c.use_bias);
  for (const char* per_head : {"mixer.A_log", "mixer.D", "mixer.dt_bias"})
    unit.tensor(per_head, {c.mamba_num_heads});
  unit.linear("mixer.in_proj", inner + convolved + c.mamba_num_heads, c.hidden_size, bias);
  unit.tensor("mixer.conv1d.weight", {convolved, 1, c.conv_kernel});
  if (c.use_conv_bias) unit.tensor("mixer.conv1d.bias", {convolved});
  unit.norm("mixer.norm", inner);
  unit.linear("mixer.out_proj", c.hidden_size, inner, bias);
}

ModelShape build(std::string name, const NemotronHConfig& c) {
  validate(c);
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
                    {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c),
                     bias_if(c.attention_bias)});
    } else {
      unit.linear("mixer.up_proj", c.intermediate_size, c.hidden_size, bias_if(c.mlp_bias));
      unit.linear("mixer.down_proj", c.hidden_size, c.intermediate_size, bias_if(c.mlp_bias));
    }
    model.add(std::move(unit));
  }
  add_head(model, {"backbone.norm_f", c.vocab_size, c.hidden_size, c.tie_word_embeddings},
           embedding);
  return std::move(model).build();
}

ModelShape build(std::string name, const ModelConfig& config) {
  return std::visit([&](const auto& c) { return build(std::move(name), c); }, config);
}

}  // namespace

ModelShape build_model(std::string name, const PlannableConfig& config) {
  return std::visit([&](const auto& c) { return build(std::move(name), c); }, config);
}

}  // namespace fsdp
