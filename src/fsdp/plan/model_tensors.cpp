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
#include "fsdp/plan/model_layers.h"

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

  void experts(StackedExperts stack, int64_t num_chosen) {
    for (std::string& part : stack.parts) part = prefix_ + part;
    unit_.tensors.push_back(
        {.name = prefix_ + stack.name,
         .shape = stack.shape,
         .num_experts = stack.num_experts,
         .num_chosen = num_chosen,
         .is_quantizable = is_quantizable(stack.shape[0], stack.shape[1]),
         .matrix_rows = {stack.shape[0] / static_cast<int64_t>(stack.parts.size())},
         .parts = std::move(stack.parts)});
  }

  // Chooses experts: weight [num_experts, in].
  void router(const std::string& name, int64_t num_experts, int64_t in, Bias bias) {
    tensor(name + ".weight", {num_experts, in});
    if (bias == Bias::kWith)
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

// The tensors of layers of `hidden` channels in a unit, under a prefix.
class LayerTensors {
 public:
  LayerTensors(UnitBuilder& unit, std::string prefix, int64_t hidden)
      : unit_(unit), prefix_(std::move(prefix)), hidden_(hidden) {}

  void operator()(const AttentionLayer& a) const {
    linear("q_proj", (a.is_gated ? 2 : 1) * a.queries(), hidden_, bias_if(a.bias),
           by_outputs(a.num_heads));
    for (const char* projection : {"k_proj", "v_proj"})
      linear(projection, a.keys(), hidden_, bias_if(a.bias), by_outputs(a.num_kv_heads));
    linear("o_proj", hidden_, a.queries(), bias_if(a.output_bias), by_inputs(a.num_heads));
    if (!a.qk_norm) return;
    norm("q_norm", a.head_dim);
    norm("k_norm", a.head_dim);
  }

  void operator()(const LatentAttentionLayer& layer) const {
    const DeepseekV3Config& c = *layer.config;
    const int64_t num_heads = c.decoder.num_attention_heads;
    const int64_t queries = num_heads * query_head_dim_of(c);
    const Bias bias = bias_if(c.decoder.attention_bias);
    const LinearCut heads = by_outputs(num_heads);
    if (c.q_lora_rank == 0) {
      linear("q_proj", queries, hidden_, Bias::kWithout, heads);
    } else {
      linear("q_a_proj", c.q_lora_rank, hidden_, bias);
      norm("q_a_layernorm", c.q_lora_rank);
      linear("q_b_proj", queries, c.q_lora_rank, Bias::kWithout, heads);
    }
    linear("kv_a_proj_with_mqa", c.kv_lora_rank + head_dim_of(c.decoder), hidden_, bias);
    norm("kv_a_layernorm", c.kv_lora_rank);
    linear("kv_b_proj", num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank,
           Bias::kWithout, heads);
    linear("o_proj", hidden_, num_heads * c.v_head_dim, bias, by_inputs(num_heads));
  }

  // Groups are shared out with their heads.
  void operator()(const MambaLayer& layer) const {
    const NemotronHConfig& c = *layer.config;
    const int64_t inner = c.mamba_num_heads * c.mamba_head_dim;
    const int64_t per_group = c.n_groups * c.ssm_state_size;
    const int64_t convolved = inner + 2 * per_group;  // x, B and C
    const Bias bias = bias_if(c.use_bias);
    for (const char* per_head : {"A_log", "D", "dt_bias"})
      shared_rows(per_head, {c.mamba_num_heads}, c.n_groups);
    unit_.fused_linear(named("in_proj"), {inner, inner, per_group, per_group, c.mamba_num_heads},
                       hidden_, bias, by_outputs(c.n_groups));
    shared_rows("conv1d.weight", {convolved, 1, c.conv_kernel}, c.n_groups);
    if (c.use_conv_bias) shared_rows("conv1d.bias", {convolved}, c.n_groups);
    shared_rows("norm.weight", {inner}, c.n_groups);
    linear("out_proj", hidden_, inner, bias, by_inputs(c.n_groups));
  }

  // Key heads are shared out, with all that belongs to them.
  void operator()(const DeltaNetLayer& layer) const {
    const Qwen3NextConfig& c = *layer.config;
    const int64_t keys = c.linear_num_key_heads * c.linear_key_head_dim;
    const int64_t values = c.linear_num_value_heads * c.linear_value_head_dim;
    const int64_t parts = c.linear_num_key_heads;
    for (const char* per_head : {"dt_bias", "A_log"})
      shared_rows(per_head, {c.linear_num_value_heads}, parts);
    linear("in_proj_qkvz", 2 * keys + 2 * values, hidden_, Bias::kWithout, by_outputs(parts));
    linear("in_proj_ba", 2 * c.linear_num_value_heads, hidden_, Bias::kWithout, by_outputs(parts));
    shared_rows("conv1d.weight", {2 * keys + values, 1, c.linear_conv_kernel_dim}, parts);
    norm("norm", c.linear_value_head_dim);
    linear("out_proj", hidden_, values, Bias::kWithout, by_inputs(parts));
  }

  void operator()(const MlpLayer& mlp) const { add_mlp("", mlp, /*is_cut=*/true); }

  // Each rank of a tp group has tokens for all that is beside the experts.
  void operator()(const ExpertsLayer& e) const {
    unit_.router(named("gate"), e.experts, hidden_, bias_if(e.has_sigmoid_router));
    for (const StackedExperts& stack : e.stacks) unit_.experts(stack, e.chosen);
    if (e.latent > 0) {
      linear("fc1_latent_proj", e.latent, hidden_, bias_if(e.bias));
      linear("fc2_latent_proj", hidden_, e.latent, bias_if(e.bias));
    }
    if (e.shared > 0) add_mlp(e.shared_name + ".", e.shared_mlp(), /*is_cut=*/false);
    if (e.is_shared_gated) linear(e.shared_name + "_gate", 1, hidden_);
  }

 private:
  std::string named(const std::string& name) const { return concat(prefix_, ".", name); }
  void linear(const std::string& name, int64_t out, int64_t in, Bias bias = Bias::kWithout,
              const LinearCut& cut = {}) const {
    unit_.linear(named(name), out, in, bias, cut);
  }
  void norm(const std::string& name, int64_t dim) const { unit_.norm(named(name), dim); }
  void shared_rows(const std::string& name, std::vector<int64_t> shape, int64_t num_parts) const {
    unit_.shared_rows(named(name), std::move(shape), num_parts);
  }
  void add_mlp(const std::string& prefix, const MlpLayer& mlp, bool is_cut) const {
    const LinearCut into = is_cut ? by_outputs(mlp.inner) : LinearCut{};
    if (mlp.is_gated) linear(prefix + "gate_proj", mlp.inner, hidden_, bias_if(mlp.bias), into);
    linear(prefix + "up_proj", mlp.inner, hidden_, bias_if(mlp.bias), into);
    linear(prefix + "down_proj", hidden_, mlp.inner, bias_if(mlp.bias),
           is_cut ? by_inputs(mlp.inner) : LinearCut{});
  }

  UnitBuilder& unit_;
  const std::string prefix_;
  const int64_t hidden_;
};

UnitBuilder unit_of(const BlockShape& block, int64_t hidden) {
  UnitBuilder unit(block.name, block.name + ".");
  if (block.joins_embedding) {
    unit.norm("enorm", hidden);
    unit.norm("hnorm", hidden);
    unit.linear("eh_proj", hidden, 2 * hidden);
  }
  for (const BranchShape& branch : block.branches) {
    unit.norm(branch.norm, hidden);
    std::visit(LayerTensors(unit, branch.name, hidden), branch.layer);
  }
  if (!block.head_norm.empty()) unit.norm(block.head_norm, hidden);
  return unit;
}

ModelShape build(std::string name, const ModelLayers& layers) {
  ModelBuilder model(std::move(name));
  UnitBuilder table(layers.embedding, layers.embedding);
  table.vocabulary(".weight", layers.vocab_size, layers.hidden_size);
  const int64_t embedding = model.add(std::move(table));
  for (const BlockShape& block : layers.blocks) model.add(unit_of(block, layers.hidden_size));
  UnitBuilder last("lm_head", "");
  if (!layers.is_tied) last.vocabulary("lm_head.weight", layers.vocab_size, layers.hidden_size);
  last.norm(layers.head_norm, layers.hidden_size);
  const int64_t head = model.add(std::move(last));
  if (layers.is_tied) model.use_within(embedding);
  // A prediction embeds the shifted tokens, and ends in the main model's head.
  for (const BlockShape& block : layers.predictions) {
    if (block.joins_embedding) model.use_again(embedding);
    model.add(unit_of(block, layers.hidden_size));
    if (block.head_norm.empty()) continue;
    model.use_again(head);
    if (layers.is_tied) model.use_within(embedding);
  }
  return std::move(model).build();
}

}  // namespace

ModelShape build_model(std::string name, const ModelConfig& config) {
  validate(config);
  ModelShape model = build(std::move(name), layers_of(config));
  model.layers = config;
  return model;
}

}  // namespace fsdp
