#include "fsdp/plan/model_tensors.h"

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/plan/model_layers.h"

namespace fsdp {

namespace {

// The dim of a matrix that the ranks of a tp group share, and in how many parts: the layers' own
// cuts (nn/layers/matrix_layers.h).
using LinearCut = std::optional<TpCut>;
LinearCut by_outputs(int64_t num_parts) { return TpCut{.dim = 0, .num_parts = num_parts}; }
LinearCut by_inputs(int64_t num_parts) { return TpCut{.dim = 1, .num_parts = num_parts}; }

// Adds tensors to a unit, whose names begin alike.
class UnitTensors {
 public:
  UnitTensors(UnitShape& unit, std::string prefix) : unit_(unit), prefix_(std::move(prefix)) {}

  // The ranks of a tp group share its rows, in parts that are not cut; 0: they do not. Of a tensor
  // with sections a part is some rows of each.
  TensorShape& tensor(const std::string& name, std::vector<int64_t> shape, int64_t num_parts = 0) {
    TensorShape& tensor = unit_.tensors.emplace_back();
    tensor.name = prefix_ + name;
    tensor.shape = std::move(shape);
    if (num_parts > 0) tensor.cut = by_outputs(num_parts);
    return tensor;
  }

  void norm(const std::string& name, int64_t dim) { tensor(name + ".weight", {dim}); }

  // y = W x (+ b), with a weight of [out, in] that projections with these outputs are fused to.
  void linear(const std::string& name, std::vector<int64_t> outs, int64_t in, bool bias = false,
              const LinearCut& cut = {}) {
    const int64_t out = std::accumulate(outs.begin(), outs.end(), int64_t{0});
    TensorShape& weight = tensor(name + ".weight", {out, in});
    weight.cut = cut;
    weight.is_linear = true;
    weight.is_quantizable = is_quantizable(out, in);
    if (out > 1) weight.matrix_rows = std::move(outs);
    if (bias) tensor(name + ".bias", {out}, cut && cut->dim == 0 ? cut->num_parts : 0);
  }

  void experts(StackedExperts stack, int64_t num_chosen) {
    for (std::string& part : stack.parts) part = prefix_ + part;
    TensorShape& experts = tensor(stack.name, stack.shape);
    experts.num_experts = stack.num_experts;
    experts.num_chosen = num_chosen;
    experts.is_quantizable = is_quantizable(stack.shape[0], stack.shape[1]);
    experts.matrix_rows = {stack.shape[0] / static_cast<int64_t>(stack.parts.size())};
    experts.parts = std::move(stack.parts);
  }

  // Rows of the vocabulary, which ranks share if they can.
  void vocabulary(const ModelLayers& model) {
    tensor("weight", {model.vocab_size, model.hidden_size}, model.vocab_size).cut->whole_if_uneven =
        true;
  }

  // Chooses experts, with a bias for each that evens out the load, or without.
  void router(const std::string& name, const ExpertsLayer& e, int64_t hidden) {
    tensor(name + ".weight", {e.experts, hidden});
    if (e.has_sigmoid_router)
      unit_.buffers.push_back({.name = concat(prefix_, name, ".e_score_correction_bias"),
                               .shape = {e.experts},
                               .dtype = DType::kFloat32});
  }

  void mlp(const std::string& prefix, const MlpLayer& mlp, int64_t hidden, bool is_cut) {
    const LinearCut into = is_cut ? by_outputs(mlp.inner) : LinearCut{};
    if (mlp.is_gated) linear(prefix + "gate_proj", {mlp.inner}, hidden, mlp.bias, into);
    linear(prefix + "up_proj", {mlp.inner}, hidden, mlp.bias, into);
    linear(prefix + "down_proj", {hidden}, mlp.inner, mlp.bias,
           is_cut ? by_inputs(mlp.inner) : LinearCut{});
  }

 private:
  UnitShape& unit_;
  const std::string prefix_;
};

// Adds those of a layer with `hidden` channels.
struct LayerTensors {
  UnitTensors of_block;
  UnitTensors of_layer;
  int64_t hidden;

  void operator()(const AttentionLayer& a) {
    of_layer.linear("q_proj", {(a.is_gated ? 2 : 1) * a.queries()}, hidden, a.bias,
                    by_outputs(a.num_heads));
    for (const char* projection : {"k_proj", "v_proj"})
      of_layer.linear(projection, {a.keys()}, hidden, a.bias, by_outputs(a.num_kv_heads));
    of_layer.linear("o_proj", {hidden}, a.queries(), a.output_bias, by_inputs(a.num_heads));
    if (!a.qk_norm) return;
    of_layer.norm("q_norm", a.head_dim);
    of_layer.norm("k_norm", a.head_dim);
  }

  void operator()(const LatentAttentionLayer& layer) {
    const DeepseekV3Config& c = *layer.config;
    const int64_t heads = c.decoder.num_attention_heads;
    const int64_t queries = heads * query_head_dim_of(c);
    const bool bias = c.decoder.attention_bias;
    if (c.q_lora_rank == 0) {
      of_layer.linear("q_proj", {queries}, hidden, false, by_outputs(heads));
    } else {
      of_layer.linear("q_a_proj", {c.q_lora_rank}, hidden, bias);
      of_layer.norm("q_a_layernorm", c.q_lora_rank);
      of_layer.linear("q_b_proj", {queries}, c.q_lora_rank, false, by_outputs(heads));
    }
    of_layer.linear("kv_a_proj_with_mqa", {c.kv_lora_rank + head_dim_of(c.decoder)}, hidden, bias);
    of_layer.norm("kv_a_layernorm", c.kv_lora_rank);
    of_layer.linear("kv_b_proj", {heads * (c.qk_nope_head_dim + c.v_head_dim)}, c.kv_lora_rank,
                    false, by_outputs(heads));
    of_layer.linear("o_proj", {hidden}, heads * c.v_head_dim, bias, by_inputs(heads));
  }

  // Groups are shared out with their heads.
  void operator()(const MambaLayer& layer) {
    const NemotronHConfig& c = *layer.config;
    const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
    const int64_t per_group = c.n_groups * c.ssm_state_size;
    const int64_t convolved = inner + 2 * per_group;  // x, B and C
    for (const char* per_head : {"A_log", "D", "dt_bias"})
      of_layer.tensor(per_head, {c.mamba_num_heads}, c.n_groups);
    of_layer.linear("in_proj", {inner, inner, per_group, per_group, c.mamba_num_heads}, hidden,
                    c.use_bias, by_outputs(c.n_groups));
    of_layer.tensor("conv1d.weight", {convolved, 1, c.conv_kernel}, c.n_groups);
    if (c.use_conv_bias) of_layer.tensor("conv1d.bias", {convolved}, c.n_groups);
    of_layer.tensor("norm.weight", {inner}, c.n_groups);
    of_layer.linear("out_proj", {hidden}, inner, c.use_bias, by_inputs(c.n_groups));
  }

  // Key heads are shared out, with all that belongs to them.
  void operator()(const DeltaNetLayer& layer) {
    const Qwen3NextConfig& c = *layer.config;
    const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
    const int64_t values = c.linear_num_value_heads * c.linear_value_head_dim;
    const int64_t parts = c.linear_num_key_heads;
    for (const char* per_head : {"dt_bias", "A_log"})
      of_layer.tensor(per_head, {c.linear_num_value_heads}, parts);
    of_layer.linear("in_proj_qkvz", {2 * keys + 2 * values}, hidden, false, by_outputs(parts));
    of_layer.linear("in_proj_ba", {2 * c.linear_num_value_heads}, hidden, false, by_outputs(parts));
    of_layer.tensor("conv1d.weight", {2 * keys + values, 1, c.linear_conv_kernel_dim}, parts);
    of_layer.norm("norm", c.linear_value_head_dim);
    of_layer.linear("out_proj", {hidden}, values, false, by_inputs(parts));
  }

  void operator()(const MlpLayer& mlp) { of_layer.mlp("", mlp, hidden, /*is_cut=*/true); }

  // Each rank of a tp group has tokens for all that is beside the experts.
  void operator()(const ExpertsLayer& e) {
    of_layer.router("gate", e, hidden);
    for (const StackedExperts& stack : e.stacks) of_block.experts(stack, e.chosen);
    if (e.latent > 0) {
      of_layer.linear("fc1_latent_proj", {e.latent}, hidden, e.bias);
      of_layer.linear("fc2_latent_proj", {hidden}, e.latent, e.bias);
    }
    if (e.shared > 0) of_layer.mlp(e.shared_name + ".", e.shared_mlp(), hidden, /*is_cut=*/false);
    if (e.is_shared_gated) of_layer.linear(e.shared_name + "_gate", {1}, hidden);
  }
};

UnitShape unit_of(const BlockShape& block, int64_t hidden) {
  UnitShape unit{block.name, {}};
  UnitTensors of_block(unit, block.name + ".");
  if (block.joins_embedding) {
    of_block.norm("enorm", hidden);
    of_block.norm("hnorm", hidden);
    of_block.linear("eh_proj", {hidden}, 2 * hidden);
  }
  for (const BranchShape& branch : block.branches) {
    of_block.norm(branch.norm, hidden);
    const UnitTensors of_layer(unit, concat(block.name, ".", branch.name, "."));
    std::visit(LayerTensors{of_block, of_layer, hidden}, branch.layer);
  }
  if (!block.head_norm.empty()) of_block.norm(block.head_norm, hidden);
  return unit;
}

ModelShape build(std::string name, const ModelLayers& layers) {
  ModelShape model{std::move(name), {}, {}};
  const auto use = [&](int64_t unit) {
    model.uses.push_back(unit);
    model.ends.push_back(static_cast<int64_t>(model.ends.size()));
  };
  const auto add = [&](UnitShape unit) {
    model.units.push_back(std::move(unit));
    use(static_cast<int64_t>(model.units.size()) - 1);
  };
  // The embedding of a tied head belongs to its use.
  const auto end_tied = [&] {
    if (!layers.is_tied) return;
    use(0);
    model.ends[model.ends.size() - 2] = model.ends.back();
  };
  UnitShape table{layers.embedding, {}};
  UnitTensors(table, layers.embedding + ".").vocabulary(layers);
  add(std::move(table));
  for (const BlockShape& block : layers.blocks) add(unit_of(block, layers.hidden_size));
  UnitShape head{"lm_head", {}};
  if (!layers.is_tied) UnitTensors(head, "lm_head.").vocabulary(layers);
  UnitTensors(head, "").norm(layers.head_norm, layers.hidden_size);
  add(std::move(head));
  end_tied();
  // A prediction embeds the shifted tokens, and ends in the main model's head.
  for (const BlockShape& block : layers.predictions) {
    if (block.joins_embedding) use(0);
    add(unit_of(block, layers.hidden_size));
    if (block.head_norm.empty()) continue;
    use(static_cast<int64_t>(layers.head_unit()));
    end_tied();
  }
  model.validate();
  return model;
}

}  // namespace

ModelShape build_model(std::string name, const ModelConfig& config) {
  validate(config);
  ModelShape model = build(std::move(name), layers_of(config));
  model.layers = config;
  return model;
}

}  // namespace fsdp
