// The model whose whole steps a table of rates has beside their parts: what the parts do not
// explain, the host's time above all, follows from them.
#pragma once

#include <cstdint>

#include "fsdp/base/dtype.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp {

// Of a table's grid "step", and of "recorded step": axes "layers" and "tokens".
struct ReferenceStep {
  LlamaConfig model;  // but for its layers
  DType compute = DType::kBFloat16;
  int64_t sequence = 0;    // of the steps with many tokens
  int64_t few_tokens = 0;  // so few that a GPU waits for its host
};

inline ReferenceStep reference_step(bool on_cpu) {
  if (on_cpu)
    return {.model = {.vocab_size = 512,
                      .hidden_size = 256,
                      .num_attention_heads = 4,
                      .num_key_value_heads = 2,
                      .intermediate_size = 768,
                      .max_position_embeddings = 4096},
            .compute = DType::kFloat32,
            .sequence = 128,
            .few_tokens = 2};
  return {.model = {.vocab_size = 32000,
                    .hidden_size = 3072,
                    .num_attention_heads = 24,
                    .num_key_value_heads = 8,
                    .intermediate_size = 8192,
                    .max_position_embeddings = 4096},
          .compute = DType::kBFloat16,
          .sequence = 2048,
          .few_tokens = 16};
}

}  // namespace fsdp
