#include "fsdp/plan/model_catalog.h"

#include <array>

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/presets.h"
#include "fsdp/plan/architecture.h"

namespace fsdp {

namespace {

struct Entry {
  const char* name;
  PlannableConfig config;
};

// The numbers of the published configurations. What can be trained by name can be planned, too.
const std::array<Entry, 5>& published() {
  static const std::array<Entry, 5> kPublished = {{
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
      {"deepseek-v3", DeepseekV3Config{.vocab_size = 129280,
                                       .hidden_size = 7168,
                                       .num_hidden_layers = 61,
                                       .num_attention_heads = 128,
                                       .q_lora_rank = 1536,
                                       .kv_lora_rank = 512,
                                       .qk_nope_head_dim = 128,
                                       .qk_rope_head_dim = 64,
                                       .v_head_dim = 128,
                                       .intermediate_size = 18432,
                                       .moe_intermediate_size = 2048,
                                       .n_routed_experts = 256,
                                       .n_shared_experts = 1,
                                       .first_k_dense_replace = 3,
                                       .num_nextn_predict_layers = 1}},
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
  }};
  return kPublished;
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Entry& entry : published()) names.emplace_back(entry.name);
  for (const ModelPreset& preset : model_presets()) names.emplace_back(preset.name);
  return names;
}

ModelShape model_by_name(std::string_view name) {
  for (const Entry& entry : published())
    if (entry.name == name) return build_model(entry.name, entry.config);
  if (const ModelPreset* preset = find_preset(name))
    return build_model(preset->name, preset->config);
  const std::vector<std::string> names = model_names();
  const std::string near = nearest(name, names);
  throw UsageError(concat("model is '", name, "', which is not known; ",
                          near.empty() ? "the" : concat("did you mean '", near, "'? The"),
                          " known models are ", join(names, ", ")));
}

}  // namespace fsdp
