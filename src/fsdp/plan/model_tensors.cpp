#include "fsdp/plan/model_tensors.h"

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp {

namespace {

// --- units and models, tensor by tensor ----------------------------------------------------------

enum class Bias { kWithout, kWith };

// The dim of a matrix that the ranks of a tp group share, and in how many parts: the layers' own
// cuts (nn/layers/matrix_layers.h).
using LinearCut = std::optional<TpCut>;
LinearCut by_outputs(int64_t num_parts) { return TpCut{.dim = 0, .num_parts = num_parts}; }
LinearCut by_inputs(int64_t num_parts) { return TpCut{.dim = 1, .num_parts = num_parts}; }

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

  // The ranks of a tp group share its rows, in parts that are not cut. Of a tensor with sections a
  // part is some rows of each.
  void shared_rows(const std::string& name, std::vector<int64_t> shape, int64_t num_parts) {
    tensor(name, std::move(shape));
    unit_.tensors.back().cut = TpCut{.dim = 0, .num_parts = num_parts};
  }

  void experts(StackedExperts stack) {
    for (std::string& part : stack.parts) part = prefix_ + part;
    unit_.tensors.push_back(
        {.name = prefix_ + stack.name,
         .shape = stack.shape,
         .num_experts = stack.num_experts,
         .is_quantizable = is_quantizable(stack.shape[0], stack.shape[1]),
         .matrix_rows = {stack.shape[0] / static_cast<int64_t>(stack.parts.size())},
         .parts = std::move(stack.parts)});
  }

  // Chooses experts: weight [num_experts, in].
  void router(const std::string& name, int64_t num_experts, int64_t in) {
    tensor(name + ".weight", {num_experts, in});
  }

  // With a bias for each expert, which evens out the load.
  void biased_router(const std::string& name, int64_t num_experts, int64_t in) {
    router(name, num_experts, in);
    unit_.buffers.push_back({.name = concat(prefix_, name, ".e_score_correction_bias"),
                             .shape = {num_experts},
                             .dtype = DType::kFloat32});
  }

  // y = W x (+ b): weight [out, in].
  void linear(const std::string& name, int64_t out, int64_t in, Bias bias = Bias::kWithout,
              const LinearCut& cut = {}) {
    tensor(name + ".weight", {out, in});
    unit_.tensors.back().cut = cut;
    unit_.tensors.back().is_quantizable = is_quantizable(out, in);
    if (out > 1) unit_.tensors.back().matrix_rows = {out};
    if (bias == Bias::kWithout) return;
    tensor(name + ".bias", {out});
    if (cut && cut->dim == 0) unit_.tensors.back().cut = cut;
  }

  // A linear layer that several projections with these outputs are fused to.
  void fused_linear(const std::string& name, std::vector<int64_t> outs, int64_t in, Bias bias,
                    const LinearCut& cut) {
    const auto first = unit_.tensors.size();
    linear(name, std::accumulate(outs.begin(), outs.end(), int64_t{0}), in, bias, cut);
    unit_.tensors[first].matrix_rows = std::move(outs);
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
    use_again(index);
    return index;
  }

  void use_again(int64_t index) {
    model_.uses.push_back(index);
    model_.ends.push_back(static_cast<int64_t>(model_.uses.size()) - 1);
  }

  // Belongs to the use that was added last.
  void use_within(int64_t index) {
    use_again(index);
    model_.ends[model_.ends.size() - 2] = model_.ends.back();
  }

  ModelShape build() && {
    model_.validate();
    return std::move(model_);
  }

 private:
  ModelShape model_;
};

// --- layers --------------------------------------------------------------------------------------

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

// The units that multi-token prediction uses once more.
struct SharedUnits {
  int64_t embedding;
  int64_t head;
  bool tied;

  void use_head_again(ModelBuilder& model) const {
    model.use_again(head);
    if (tied) model.use_within(embedding);
  }
};

SharedUnits add_head(ModelBuilder& model, const Head& head, int64_t embedding) {
  UnitBuilder unit("lm_head", "");
  if (!head.tied) unit.vocabulary("lm_head.weight", head.vocab_size, head.hidden_size);
  unit.norm(head.norm, head.hidden_size);
  const int64_t index = model.add(std::move(unit));
  if (head.tied) model.use_within(embedding);
  return {embedding, index, head.tied};
}

std::string layer_name(const char* stack, int64_t layer) {
  return concat(stack, ".layers.", layer);
}

struct Attention {
  int64_t hidden_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  Bias bias;  // of queries, keys and values
  Bias output_bias;
  bool qk_norm = false;
  bool is_gated = false;  // each query has a gate beside it
};

void add_attention(UnitBuilder& unit, const std::string& prefix, const Attention& a) {
  unit.linear(prefix + ".q_proj", (a.is_gated ? 2 : 1) * a.num_heads * a.head_dim, a.hidden_size,
              a.bias, by_outputs(a.num_heads));
  for (const char* projection : {".k_proj", ".v_proj"})
    unit.linear(prefix + projection, a.num_kv_heads * a.head_dim, a.hidden_size, a.bias,
                by_outputs(a.num_kv_heads));
  unit.linear(prefix + ".o_proj", a.hidden_size, a.num_heads * a.head_dim, a.output_bias,
              by_inputs(a.num_heads));
  if (!a.qk_norm) return;
  unit.norm(prefix + ".q_norm", a.head_dim);
  unit.norm(prefix + ".k_norm", a.head_dim);
}

enum class MlpTensors : uint8_t { kGated, kPlain };
enum class MlpRanks : uint8_t { kCut, kWhole };  // whole: as experts are, each rank has tokens

void add_mlp(UnitBuilder& unit, const std::string& prefix, int64_t dim, int64_t inner,
             MlpRanks ranks, MlpTensors tensors = MlpTensors::kGated, Bias bias = Bias::kWithout) {
  const bool is_cut = ranks == MlpRanks::kCut;
  if (tensors == MlpTensors::kGated)
    unit.linear(prefix + ".gate_proj", inner, dim, bias, is_cut ? by_outputs(inner) : LinearCut{});
  unit.linear(prefix + ".up_proj", inner, dim, bias, is_cut ? by_outputs(inner) : LinearCut{});
  unit.linear(prefix + ".down_proj", dim, inner, bias, is_cut ? by_inputs(inner) : LinearCut{});
}

template <typename Config>
void add_stacked_experts(UnitBuilder& unit, const Config& c) {
  for (StackedExperts& stack : stacked_experts(*expert_names(ModelConfig(c))))
    unit.experts(std::move(stack));
}

void add_mixtral_experts(UnitBuilder& unit, const MixtralConfig& c) {
  const std::string module = experts_module(c);
  unit.router(module + ".gate", c.num_local_experts, c.decoder.hidden_size);
  add_stacked_experts(unit, c);
  if (c.shared_expert_intermediate_size > 0)
    add_mlp(unit, module + ".shared_expert", c.decoder.hidden_size,
            c.shared_expert_intermediate_size, MlpRanks::kWhole);
}

// `experts`: nullptr for a dense MLP.
void add_llama_block(UnitBuilder& unit, const LlamaConfig& c, const MixtralConfig* experts) {
  unit.norm("input_layernorm", c.hidden_size);
  add_attention(unit, "self_attn",
                {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c),
                 bias_if(has_qkv_bias(c)), bias_if(c.attention_bias), c.qk_norm});
  unit.norm("post_attention_layernorm", c.hidden_size);
  if (experts != nullptr)
    add_mixtral_experts(unit, *experts);
  else
    add_mlp(unit, "mlp", c.hidden_size, c.intermediate_size, MlpRanks::kCut, MlpTensors::kGated,
            bias_if(c.mlp_bias));
}

void add_joined_states(UnitBuilder& unit, int64_t hidden_size) {
  unit.norm("enorm", hidden_size);
  unit.norm("hnorm", hidden_size);
  unit.linear("eh_proj", hidden_size, 2 * hidden_size);
}

// Layers after the main ones, as the published checkpoints number them. Each embeds the shifted
// tokens, joins them with the hidden state, runs one block and ends in the main model's head.
template <typename AddBlock>
void add_prediction_layers(ModelBuilder& model, const LlamaConfig& c, const SharedUnits& shared,
                           const AddBlock& add_block) {
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
    model.use_again(shared.embedding);
    const int64_t layer = c.num_hidden_layers + i;
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    add_joined_states(unit, c.hidden_size);
    add_block(unit, layer);
    unit.norm("shared_head.norm", c.hidden_size);
    model.add(std::move(unit));
    shared.use_head_again(model);
  }
}

// add_block(unit, layer) adds a layer's tensors.
template <typename AddBlock>
ModelShape build_decoder(std::string name, const LlamaConfig& c, const AddBlock& add_block) {
  ModelBuilder model(std::move(name));
  const int64_t embedding = add_embedding(model, "model.embed_tokens", c.vocab_size, c.hidden_size);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const std::string block = layer_name("model", layer);
    UnitBuilder unit(block, block + ".");
    add_block(unit, layer);
    model.add(std::move(unit));
  }
  const SharedUnits shared = add_head(
      model, {"model.norm", c.vocab_size, c.hidden_size, c.tie_word_embeddings}, embedding);
  add_prediction_layers(model, c, shared, add_block);
  return std::move(model).build();
}

ModelShape build(std::string name, const LlamaConfig& c) {
  return build_decoder(std::move(name), c,
                       [&](UnitBuilder& unit, int64_t) { add_llama_block(unit, c, nullptr); });
}

ModelShape build(std::string name, const MixtralConfig& c) {
  return build_decoder(std::move(name), c.decoder,
                       [&](UnitBuilder& unit, int64_t) { add_llama_block(unit, c.decoder, &c); });
}

// Key heads are shared out, with all that belongs to them.
void add_delta_net(UnitBuilder& unit, const std::string& prefix, const Qwen3NextConfig& c) {
  const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
  const int64_t values = c.linear_num_value_heads * c.linear_value_head_dim;
  const int64_t parts = c.linear_num_key_heads;
  for (const char* per_head : {".dt_bias", ".A_log"})
    unit.shared_rows(prefix + per_head, {c.linear_num_value_heads}, parts);
  unit.linear(prefix + ".in_proj_qkvz", 2 * keys + 2 * values, c.decoder.hidden_size,
              Bias::kWithout, by_outputs(parts));
  unit.linear(prefix + ".in_proj_ba", 2 * c.linear_num_value_heads, c.decoder.hidden_size,
              Bias::kWithout, by_outputs(parts));
  unit.shared_rows(prefix + ".conv1d.weight", {2 * keys + values, 1, c.linear_conv_kernel_dim},
                   parts);
  unit.norm(prefix + ".norm", c.linear_value_head_dim);
  unit.linear(prefix + ".out_proj", c.decoder.hidden_size, values, Bias::kWithout,
              by_inputs(parts));
}

void add_qwen3_next_experts(UnitBuilder& unit, const Qwen3NextConfig& c) {
  unit.router("mlp.gate", c.num_experts, c.decoder.hidden_size);
  add_stacked_experts(unit, c);
  add_mlp(unit, "mlp.shared_expert", c.decoder.hidden_size, c.shared_expert_intermediate_size,
          MlpRanks::kWhole);
  unit.linear("mlp.shared_expert_gate", 1, c.decoder.hidden_size);
}

void add_qwen3_next_block(UnitBuilder& unit, const Qwen3NextConfig& config, int64_t layer) {
  const LlamaConfig& c = config.decoder;
  unit.norm("input_layernorm", c.hidden_size);
  if (layer_type_of(config, layer) == LayerType::kLinearAttention)
    add_delta_net(unit, "linear_attn", config);
  else
    add_attention(unit, "self_attn",
                  {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c),
                   bias_if(c.attention_bias), bias_if(c.attention_bias), /*qk_norm=*/true,
                   /*is_gated=*/true});
  unit.norm("post_attention_layernorm", c.hidden_size);
  if (has_experts(config, layer))
    add_qwen3_next_experts(unit, config);
  else
    add_mlp(unit, "mlp", c.hidden_size, c.intermediate_size, MlpRanks::kCut);
}

ModelShape build(std::string name, const Qwen3NextConfig& c) {
  return build_decoder(std::move(name), c.decoder, [&](UnitBuilder& unit, int64_t layer) {
    add_qwen3_next_block(unit, c, layer);
  });
}

void add_latent_attention(UnitBuilder& unit, const DeepseekV3Config& c) {
  const int64_t hidden_size = c.decoder.hidden_size;
  const int64_t num_heads = c.decoder.num_attention_heads;
  const int64_t queries = num_heads * query_head_dim_of(c);
  const Bias bias = bias_if(c.decoder.attention_bias);
  const LinearCut heads = by_outputs(num_heads);
  if (c.q_lora_rank == 0) {
    unit.linear("self_attn.q_proj", queries, hidden_size, Bias::kWithout, heads);
  } else {
    unit.linear("self_attn.q_a_proj", c.q_lora_rank, hidden_size, bias);
    unit.norm("self_attn.q_a_layernorm", c.q_lora_rank);
    unit.linear("self_attn.q_b_proj", queries, c.q_lora_rank, Bias::kWithout, heads);
  }
  unit.linear("self_attn.kv_a_proj_with_mqa", c.kv_lora_rank + head_dim_of(c.decoder), hidden_size,
              bias);
  unit.norm("self_attn.kv_a_layernorm", c.kv_lora_rank);
  unit.linear("self_attn.kv_b_proj", num_heads * (c.qk_nope_head_dim + c.v_head_dim),
              c.kv_lora_rank, Bias::kWithout, heads);
  unit.linear("self_attn.o_proj", hidden_size, num_heads * c.v_head_dim, bias,
              by_inputs(num_heads));
}

void add_deepseek_experts(UnitBuilder& unit, const DeepseekV3Config& c) {
  unit.biased_router("mlp.gate", c.n_routed_experts, c.decoder.hidden_size);
  add_stacked_experts(unit, c);
  if (c.n_shared_experts > 0)
    add_mlp(unit, "mlp.shared_experts", c.decoder.hidden_size,
            c.n_shared_experts * c.moe_intermediate_size, MlpRanks::kWhole);
}

void add_deepseek_block(UnitBuilder& unit, const DeepseekV3Config& c, int64_t layer) {
  unit.norm("input_layernorm", c.decoder.hidden_size);
  add_latent_attention(unit, c);
  unit.norm("post_attention_layernorm", c.decoder.hidden_size);
  if (has_experts(c, layer))
    add_deepseek_experts(unit, c);
  else
    add_mlp(unit, "mlp", c.decoder.hidden_size, c.decoder.intermediate_size, MlpRanks::kCut);
}

ModelShape build(std::string name, const DeepseekV3Config& c) {
  return build_decoder(std::move(name), c.decoder, [&](UnitBuilder& unit, int64_t layer) {
    add_deepseek_block(unit, c, layer);
  });
}

void add_mamba(UnitBuilder& unit, const NemotronHConfig& c) {
  const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
  const int64_t per_group = c.n_groups * c.ssm_state_size;
  const int64_t convolved = inner + 2 * per_group;  // x, B and C
  const Bias bias = bias_if(c.use_bias);
  for (const char* per_head : {"mixer.A_log", "mixer.D", "mixer.dt_bias"})
    unit.shared_rows(per_head, {c.mamba_num_heads}, c.n_groups);
  unit.fused_linear("mixer.in_proj", {inner, inner, per_group, per_group, c.mamba_num_heads},
                    c.hidden_size, bias, by_outputs(c.n_groups));
  unit.shared_rows("mixer.conv1d.weight", {convolved, 1, c.conv_kernel}, c.n_groups);
  if (c.use_conv_bias) unit.shared_rows("mixer.conv1d.bias", {convolved}, c.n_groups);
  unit.shared_rows("mixer.norm.weight", {inner}, c.n_groups);
  unit.linear("mixer.out_proj", c.hidden_size, inner, bias, by_inputs(c.n_groups));
}

void add_hybrid_experts(UnitBuilder& unit, const NemotronHConfig& c) {
  const Bias bias = bias_if(c.mlp_bias);
  unit.biased_router("mixer.gate", c.n_routed_experts, c.hidden_size);
  add_stacked_experts(unit, c);
  if (c.moe_latent_size > 0) {
    unit.linear("mixer.fc1_latent_proj", c.moe_latent_size, c.hidden_size, bias);
    unit.linear("mixer.fc2_latent_proj", c.hidden_size, c.moe_latent_size, bias);
  }
  if (c.moe_shared_expert_intermediate_size == 0) return;
  add_mlp(unit, "mixer.shared_experts", c.hidden_size, c.moe_shared_expert_intermediate_size,
          MlpRanks::kWhole, MlpTensors::kPlain, bias);
}

void add_mixer(UnitBuilder& unit, const NemotronHConfig& c, char kind) {
  unit.norm("norm", c.hidden_size);
  if (kind == 'M') {
    add_mamba(unit, c);
  } else if (kind == '*') {
    add_attention(unit, "mixer",
                  {c.hidden_size, c.num_attention_heads, c.num_key_value_heads, head_dim_of(c),
                   bias_if(c.attention_bias), bias_if(c.attention_bias)});
  } else if (kind == 'E') {
    add_hybrid_experts(unit, c);
  } else {
    add_mlp(unit, "mixer", c.hidden_size, c.intermediate_size, MlpRanks::kCut, MlpTensors::kPlain,
            bias_if(c.mlp_bias));
  }
}

// Like add_prediction_layers(), with the layers of a pattern for each token.
void add_hybrid_predictions(ModelBuilder& model, const NemotronHConfig& c,
                            const SharedUnits& shared) {
  const std::string& pattern = c.mtp_hybrid_override_pattern;
  int64_t layer = 0;
  for (int64_t i = 0; i < c.num_nextn_predict_layers; ++i) {
    model.use_again(shared.embedding);
    for (size_t k = 0; k < pattern.size(); ++k) {
      const std::string block = layer_name("mtp", layer++);
      UnitBuilder unit(block, block + ".");
      if (k == 0) add_joined_states(unit, c.hidden_size);
      add_mixer(unit, c, pattern[k]);
      if (k + 1 == pattern.size()) unit.norm("final_layernorm", c.hidden_size);
      model.add(std::move(unit));
    }
    shared.use_head_again(model);
  }
}

ModelShape build(std::string name, const NemotronHConfig& c) {
  ModelBuilder model(std::move(name));
  const int64_t embedding =
      add_embedding(model, "backbone.embeddings", c.vocab_size, c.hidden_size);
  for (size_t layer = 0; layer < c.hybrid_override_pattern.size(); ++layer) {
    const std::string block = layer_name("backbone", static_cast<int64_t>(layer));
    UnitBuilder unit(block, block + ".");
    add_mixer(unit, c, c.hybrid_override_pattern[layer]);
    model.add(std::move(unit));
  }
  const SharedUnits shared = add_head(
      model, {"backbone.norm_f", c.vocab_size, c.hidden_size, c.tie_word_embeddings}, embedding);
  add_hybrid_predictions(model, c, shared);
  return std::move(model).build();
}

}  // namespace

ModelShape build_model(std::string name, const ModelConfig& config) {
  validate(config);
  ModelShape model = std::visit([&](const auto& c) { return build(std::move(name), c); }, config);
  model.layers = config;
  model.takes_tp = true;  // every tensor that tp ranks share says so
  return model;
}

}  // namespace fsdp
