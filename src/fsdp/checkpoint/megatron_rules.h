// The names of Megatron-Core's checkpoints, as a table of rules.
#pragma once

#include <vector>

#include "fsdp/checkpoint/name_rules.h"

namespace fsdp {

// In this order, each applied to what the former made:
//
//   SwiGLU   first MLP matrix [2 f, h] -> `<name>_w`, `<name>_v`: gate and up projection
//   GDN      in_proj, conv1d of a gated delta net -> `<name>.query`, `.key`, `.value`, ...
//   MLA      linear_qkv_down_proj -> linear_q_down_proj, linear_kv_down_proj; its norm moves to
//            the layer's input_layernorm
//   experts  index among the experts of a rank -> index among all
//   MTP      mtp_model_layer -> transformer_layer
//
// Fields they ask for (sizes are those of the tensors given: divided by the tensor-parallel size
// where tensors are):
//
//   gated_linear_unit    SwiGLU where it is 1 or not stated
//   qk_dim, v_dim, num_value_heads                            GDN where qk_dim is stated
//   q_lora_rank, kv_lora_rank, qk_pos_emb_head_dim            MLA
//   expert_offset        the first expert's index among all; 0 where a rank has them all
//   mamba_mtp            1: no MTP rename, as Mamba layers keep their names
std::vector<NameRule> megatron_rules();

}  // namespace fsdp
