// Language models that the ranks of a tp group compute together, what they learn from, and what a
// rank of a grid has of them.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/language_model.h"
#include "support/small_models.h"
#include "support/test_device.h"

namespace fsdp::nn::tensor_parallel {

using testing::SmallModel;

// --- models and batches --------------------------------------------------------------------------

inline constexpr int kSteps = 3;
inline constexpr int64_t kSequence = 8;

// Eight ranks can share everything, and one of them still has two query heads for a key head.
inline LlamaConfig llama() {
  LlamaConfig config = testing::small_llama();
  config.vocab_size = 40;
  config.num_attention_heads = 16;
  config.num_key_value_heads = 8;
  config.head_dim = 2;
  config.intermediate_size = 32;
  return config;
}

inline MixtralConfig mixtral() {
  return {.decoder = llama(),
          .num_local_experts = 8,
          .num_experts_per_tok = 2,
          .router_aux_loss_coef = 0.02,
          .shared_expert_intermediate_size = 11};
}

inline std::vector<SmallModel> dense_models() {
  LlamaConfig biased = llama();
  biased.attention_bias = biased.mlp_bias = true;
  LlamaConfig tied = llama();
  tied.tie_word_embeddings = true;
  LlamaConfig normed = llama();
  normed.qk_norm = true;
  LlamaConfig uneven = llama();
  uneven.vocab_size = 37;
  LlamaConfig tied_uneven = uneven;
  tied_uneven.tie_word_embeddings = true;
  LlamaConfig qwen2 = llama();
  qwen2.family = LlamaFamily::kQwen2;
  LlamaConfig windowed = llama();
  windowed.family = LlamaFamily::kMistral;
  windowed.sliding_window = 3;
  return {{"llama", llama()},  {"biased", biased},    {"tied", tied},
          {"qk_norm", normed}, {"uneven", uneven},    {"tied_uneven", tied_uneven},
          {"qwen2", qwen2},    {"windowed", windowed}};
}

// Layers that predict further tokens: without a later token at the ends of sequences.
inline std::vector<SmallModel> predicting_models() {
  LlamaConfig plain = llama();
  plain.num_nextn_predict_layers = 2;
  LlamaConfig tied_uneven = plain;
  tied_uneven.tie_word_embeddings = true;
  tied_uneven.vocab_size = 37;
  return {{"predicting", plain}, {"predicting_tied_uneven", tied_uneven}};
}

inline MixtralConfig predicting_mixtral() {
  MixtralConfig config = mixtral();
  config.decoder.num_nextn_predict_layers = 2;
  return config;
}

// Each of eight ranks has a group of two heads.
inline NemotronHConfig hybrid() {
  NemotronHConfig config = testing::small_hybrid();
  config.vocab_size = 40;
  config.intermediate_size = 32;
  config.hybrid_override_pattern = "M-M*-";
  config.mamba_num_heads = 16;
  config.mamba_head_dim = 2;
  config.n_groups = 8;
  config.ssm_state_size = 3;
  config.num_attention_heads = 16;
  config.num_key_value_heads = 8;
  config.head_dim = 2;
  return config;
}

inline NemotronHConfig expert_hybrid() {
  NemotronHConfig config = hybrid();
  config.hybrid_override_pattern = "ME*-";
  config.n_routed_experts = 8;
  config.moe_intermediate_size = 13;
  config.moe_shared_expert_intermediate_size = 11;
  config.moe_latent_size = 10;
  config.tie_word_embeddings = true;
  config.router_aux_loss_coef = 0.02;
  config.num_nextn_predict_layers = 2;
  return config;
}

// Each of eight ranks has a head.
inline DeepseekV3Config deepseek() {
  DeepseekV3Config config = testing::small_deepseek();
  config.decoder.vocab_size = 40;
  config.decoder.num_attention_heads = config.decoder.num_key_value_heads = 8;
  config.decoder.head_dim = 4;
  config.decoder.intermediate_size = 32;
  config.router_aux_loss_coef = 0.02;
  return config;
}

// Each of eight ranks has a key head and two value heads of a Gated DeltaNet.
inline Qwen3NextConfig qwen3_next() {
  Qwen3NextConfig config = testing::small_qwen3_next();
  config.decoder.vocab_size = 40;
  config.decoder.num_attention_heads = 16;
  config.decoder.num_key_value_heads = 8;
  config.decoder.intermediate_size = 32;
  config.linear_num_key_heads = 8;
  config.linear_num_value_heads = 16;
  config.num_experts = 8;
  return config;
}

inline std::vector<SmallModel> hybrid_models() {
  NemotronHConfig biased = hybrid();
  biased.use_bias = biased.attention_bias = biased.mlp_bias = true;
  biased.use_conv_bias = false;
  NemotronHConfig tied_uneven = hybrid();
  tied_uneven.tie_word_embeddings = true;
  tied_uneven.vocab_size = 37;
  return {{"hybrid", hybrid()}, {"hybrid_biased", biased}, {"hybrid_tied_uneven", tied_uneven}};
}

inline std::shared_ptr<LanguageModel> build(const ModelConfig& config,
                                            Recompute recompute = Recompute::kNone) {
  const auto model = build_language_model(config, {.seed = 3, .recompute = recompute});
  testing::disturb(*model);
  model->to(testing::test_device());
  return model;
}

struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

// Some targets are none, more of them in the part of the first ranks.
inline Batch batch_of(int loss, int step) {
  const at::Tensor all = testing::small_tokens(loss, step, 2, kSequence);
  Batch batch{all.narrow(1, 0, kSequence), all.narrow(1, 1, kSequence).clone()};
  batch.targets[0].narrow(0, 0, 2 + loss % 3).fill_(-100);
  batch.targets[1][5] = -100;
  return {batch.tokens.to(testing::test_device()), batch.targets.to(testing::test_device())};
}

inline at::Tensor loss_of(const std::shared_ptr<LanguageModel>& model, int loss, int step) {
  const Batch batch = batch_of(loss, step);
  return model->loss(batch.tokens, batch.targets).total;
}

// --- grids ---------------------------------------------------------------------------------------

struct Grids {
  int ranks;
  MeshOptions mesh;
  int data_parallel_size() const { return ranks / mesh.tp; }
};

inline std::string text(const Grids& grids) {
  return concat(grids.ranks, " ranks, outer ", grids.mesh.outer, ", ep ", grids.mesh.ep, ", tp ",
                grids.mesh.tp);
}

// All factorisations with a tp axis, and an ep axis of up to `most_ep` ranks.
inline std::vector<Grids> grids_of(int ranks, int most_ep) {
  std::vector<Grids> all;
  for (int outer = 1; outer <= ranks; outer *= 2)
    for (int tp = 2; outer * tp <= ranks; tp *= 2)
      for (int ep = 1; ep <= std::min(ranks, most_ep); ep *= 2)
        all.push_back({ranks, {.outer = outer, .ep = ep, .tp = tp}});
  return all;
}

// The sections of tensors of Mamba-2 and Gated DeltaNet along their first dimension; nothing for
// others.
inline std::vector<int64_t> sections_of(const std::string& name, const ModelConfig& config) {
  const auto* next = std::get_if<Qwen3NextConfig>(&config);
  if (next != nullptr && name.find("conv1d") != std::string::npos) {
    const int64_t keys = next->linear_num_key_heads * next->linear_key_head_dim;
    return {keys, keys, next->linear_num_value_heads * next->linear_value_head_dim};
  }
  const auto* c = std::get_if<NemotronHConfig>(&config);
  if (c == nullptr) return {};
  const int64_t inner = c->mamba_num_heads * c->mamba_head_dim;
  const int64_t states = c->n_groups * c->ssm_state_size;
  if (name.find("in_proj") != std::string::npos)  // gate, x, B, C, steps
    return {inner, inner, states, states, c->mamba_num_heads};
  if (name.find("conv1d") != std::string::npos) return {inner, states, states};
  return {};
}

inline at::Tensor slice_of_sections(const at::Tensor& whole, const std::vector<int64_t>& sections,
                                    const MeshAxis& tp) {
  std::vector<at::Tensor> slices;
  for (const at::Tensor& section : whole.split_with_sizes(sections, 0))
    slices.push_back(section.chunk(tp.size(), 0)[static_cast<size_t>(tp.rank())]);
  return at::cat(slices);
}

// This rank's parts of all parameters: slices of experts and of tensors, by their sizes.
inline std::vector<at::Tensor> owned_of(const std::vector<at::Tensor>& whole, const Mesh& mesh,
                                        const LanguageModel& model) {
  std::vector<at::Tensor> owned;
  size_t number = 0;
  for (const auto& item : model.named_parameters()) {
    at::Tensor tensor = whole[number++];
    const bool is_expert = item.key().find(".experts.") != std::string::npos;
    const MeshAxis* axis = is_expert ? mesh.ep() : mesh.tp();
    const std::vector<int64_t> sections = sections_of(item.key(), model.config());
    if (axis != nullptr && !sections.empty()) tensor = slice_of_sections(tensor, sections, *axis);
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      const int64_t size = item.value().size(dim);
      if (size != tensor.size(dim)) tensor = tensor.narrow(dim, axis->rank() * size, size);
    }
    owned.push_back(tensor);
  }
  return owned;
}

}  // namespace fsdp::nn::tensor_parallel
