// Tables of name rules: as JSON files, and Megatron-Core's.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/names/name_rules.h"

namespace fsdp {

// --- tables as JSON ------------------------------------------------------------------------------

// Tables of name rules as JSON files, so that a model can bring its own.
//
//   {
//     "rules": [
//       {"title": "SwiGLU", "pattern": "mlp.linear_fc1.(weight|bias)", "dim": 0,
//        "sections": [{"name": "$0_w"}, {"name": "$0_v"}],
//        "when": {"field": "gated_linear_unit", "equals": 1, "unknown": "apply"}},
//       {"pattern": "qkv.weight",
//        "sections": [{"name": "q.weight", "size": 64},
//                     {"name": "kv.weight", "size": "k_dim + v_dim"}]},
//       {"pattern": "experts.#.*", "rename": "experts.{$1 + expert_offset}.$2", "scope": "model"}
//     ],
//     "fields": [
//       {"modules": "decoder.layers.*", "values": {"k_dim": 32, "v_dim": 32, "expert_offset": 8}}
//     ]
//   }
//
//   rules     in the order they are applied; or "megatron" for the table of megatron_rules()
//   title     optional, for messages
//   pattern   of the tensors: their names' end; * any text, ? one character, # a number,
//             (a|b) a choice
//   sections  name: $0 is what the pattern described, $1 to $9 what its places stand for, and
//             {$1 + field} a number that is shifted; size: a number, or a sum of fields; without
//             size: an equal part of what the others leave
//   dim       optional, the dim that is divided; default 0
//   rename    instead of sections: the tensor under another name
//   when      optional: only for modules whose field is stated (and equals a number); "unknown":
//             "skip" (default) or "apply" where it is not
//   scope     optional: "every" name (default), or names of the "model" only, not a checkpoint's
//   fields    optional: numbers that modules state about themselves; of several patterns, the one
//             with most letters counts

// Throws a UsageError that begins with `source` for any other form.
NameRules parse_name_rules(std::string_view json_text, const std::string& source);

// --- Megatron-Core -------------------------------------------------------------------------------

// In this order, each applied to the result of the one before:
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
