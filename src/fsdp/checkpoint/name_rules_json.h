// Tables of name rules as JSON files, so that a model can bring its own.
//
//   {
//     "rules": [
//       {"title": "SwiGLU", "pattern": "mlp.linear_fc1.(weight|bias)", "dim": 0,
//        "sections": [{"name": "$0_w"}, {"name": "$0_v"}],
//        "when": {"field": "gated_linear_unit", "equals": 1, "unknown": "apply"}},
//       {"pattern": "qkv.weight",
//        "sections": [{"name": "q.weight", "size": 64}, {"name": "kv.weight", "size": "k_dim +
//        v_dim"}]},
//       {"pattern": "experts.#.*", "rename": "experts.{$1 + expert_offset}.$2", "scope": "model"}
//     ],
//     "fields": [
//       {"modules": "decoder.layers.*", "values": {"k_dim": 32, "v_dim": 32, "expert_offset": 8}}
//     ]
//   }
//
//   rules     in the order they are applied; or "megatron" for the table of megatron_rules.h
//   title     optional, for messages
//   pattern   of the tensors: their names' end; * any text, ? one character, # a number, (a|b) a
//   choice sections  name: $0 is what the pattern described, $1 to $9 what its places stand for,
//   and
//             {$1 + field} a number that is shifted; size: a number, or a sum of fields; without
//             size: an equal part of what the others leave
//   dim       optional, the dim that is divided; default 0
//   rename    instead of sections: the tensor under another name
//   when      optional: only for modules whose field is stated (and equals a number); "unknown":
//             "skip" (default) or "apply" where it is not
//   scope     optional: "every" name (default), or names of the "model" only, not a checkpoint's
//   fields    optional: numbers that modules state about themselves; of several patterns, the one
//             with most letters counts
#pragma once

#include <string>
#include <string_view>

#include "fsdp/checkpoint/name_rules.h"

namespace fsdp {

// UsageError, beginning with `source`, for whatever is not of this form.
NameRules parse_name_rules(std::string_view json_text, const std::string& source);

// The table in this form: parse_name_rules() of it makes the same rules and fields.
std::string name_rules_json(const NameRules& rules);

}  // namespace fsdp
