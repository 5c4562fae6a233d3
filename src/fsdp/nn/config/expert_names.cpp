#include <span>
#include <utility>

#include "fsdp/base/text.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp {

std::string experts_module(const MixtralConfig& c) {
  return c.decoder.qk_norm ? "mlp" : "block_sparse_moe";
}

ExpertNames expert_names(const MixtralConfig& c) {
  const std::vector<std::string> qwen = {"gate_proj", "up_proj", "down_proj"};
  return {.module = experts_module(c) + ".experts",
          .projections = c.decoder.qk_norm ? qwen : std::vector<std::string>{"w1", "w3", "w2"},
          .num_experts = c.num_local_experts,
          .hidden_size = c.decoder.hidden_size,
          .intermediate_size = c.decoder.intermediate_size};
}

ExpertNames expert_names(const NemotronHConfig& c) {
  return {.module = "mixer.experts",
          .projections = {"up_proj", "down_proj"},
          .num_experts = c.n_routed_experts,
          .hidden_size = c.moe_latent_size > 0 ? c.moe_latent_size : c.hidden_size,
          .intermediate_size = c.moe_intermediate_size};
}

ExpertNames expert_names(const Qwen3NextConfig& c) {
  return {.module = "mlp.experts",
          .projections = {"gate_proj", "up_proj", "down_proj"},
          .num_experts = c.num_experts,
          .hidden_size = c.decoder.hidden_size,
          .intermediate_size = c.moe_intermediate_size};
}

ExpertNames expert_names(const DeepseekV3Config& c) {
  return {.module = "mlp.experts",
          .projections = {"gate_proj", "up_proj", "down_proj"},
          .num_experts = c.n_routed_experts,
          .hidden_size = c.decoder.hidden_size,
          .intermediate_size = c.moe_intermediate_size};
}

std::optional<ExpertNames> expert_names(const ModelConfig& config) {
  if (const auto* deepseek = std::get_if<DeepseekV3Config>(&config)) return expert_names(*deepseek);
  if (const auto* mixtral = std::get_if<MixtralConfig>(&config)) return expert_names(*mixtral);
  if (const auto* next = std::get_if<Qwen3NextConfig>(&config)) return expert_names(*next);
  const auto* hybrid = std::get_if<NemotronHConfig>(&config);
  if (hybrid != nullptr && has_layer(*hybrid, 'E')) return expert_names(*hybrid);
  return std::nullopt;
}

std::array<StackedExperts, 2> stacked_experts(const ExpertNames& names) {
  const std::span<const std::string> into(names.projections.data(), names.projections.size() - 1);
  const auto num_into = static_cast<int64_t>(into.size());
  StackedExperts first{
      .name = concat(names.module, ".", num_into == 1 ? into.front() : "gate_up_proj"),
      .shape = {names.num_experts * num_into * names.intermediate_size, names.hidden_size},
      .num_experts = names.num_experts,
      .parts = {}};
  StackedExperts down{.name = names.module + ".down_proj",
                      .shape = {names.num_experts * names.hidden_size, names.intermediate_size},
                      .num_experts = names.num_experts,
                      .parts = {}};
  for (int64_t expert = 0; expert < names.num_experts; ++expert) {
    const std::string prefix = concat(names.module, ".", expert, ".");
    for (const std::string& name : into) first.parts.push_back(concat(prefix, name, ".weight"));
    down.parts.push_back(concat(prefix, names.projections.back(), ".weight"));
  }
  return {std::move(first), std::move(down)};
}

}  // namespace fsdp
