// Configurations that tests change in a field or two, and what such a change is answered with.
#pragma once

#include <string>

#include "fsdp/base/error.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp::testing {

inline LlamaConfig llama() {
  return {.vocab_size = 100,
          .hidden_size = 48,
          .num_hidden_layers = 3,
          .num_attention_heads = 6,
          .num_key_value_heads = 2,
          .head_dim = 8,
          .intermediate_size = 77};
}

inline NemotronHConfig hybrid() {
  return {.vocab_size = 100,
          .hidden_size = 48,
          .intermediate_size = 77,
          .hybrid_override_pattern = "M-*M",
          .mamba_num_heads = 4,
          .mamba_head_dim = 8,
          .n_groups = 2,
          .ssm_state_size = 16,
          .conv_kernel = 4,
          .num_attention_heads = 6,
          .num_key_value_heads = 2,
          .head_dim = 8};
}

template <typename Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace fsdp::testing
