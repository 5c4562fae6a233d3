#include "fsdp/checkpoint/megatron_rules.h"

#include <string>
#include <utility>

namespace fsdp {

namespace {

NameRule swiglu(std::string pattern) {
  return {
      .title = "SwiGLU",
      .pattern = std::move(pattern),
      .dim = 0,
      .sections = {{"$0_w"}, {"$0_v"}},
      .condition = FieldCondition{
          .field = "gated_linear_unit", .equals = 1, .unknown = FieldCondition::Unknown::kApply}};
}

// Mamba layers have an in_proj and a conv1d, too; only a gated delta net has a qk_dim.
NameRule gdn(std::string pattern, std::vector<SectionRule> sections) {
  return {.title = "GDN",
          .pattern = std::move(pattern),
          .dim = 0,
          .sections = std::move(sections),
          .condition = FieldCondition{.field = "qk_dim"}};
}

NameRule mla_rename(std::string pattern, std::string name) {
  return {.title = "MLA", .pattern = std::move(pattern), .sections = {{std::move(name)}}};
}

// A checkpoint has the indices among all experts already.
NameRule expert(std::string pattern, std::string name) {
  return {.title = "experts",
          .pattern = std::move(pattern),
          .sections = {{std::move(name)}},
          .scope = NameRule::Scope::kModelNames};
}

}  // namespace

std::vector<NameRule> megatron_rules() {
  return {
      swiglu("mlp.linear_fc1.(weight|bias)"),
      swiglu("mlp.experts.linear_fc1.(weight|bias)#"),
      swiglu("mlp.experts.local_experts.#.linear_fc1.(weight|bias)"),
      swiglu("mlp.shared_experts.linear_fc1.(weight|bias)"),
      gdn("in_proj.weight", {{"$0.query", "qk_dim"},
                             {"$0.key", "qk_dim"},
                             {"$0.value", "v_dim"},
                             {"$0.z", "v_dim"},
                             {"$0.beta", "num_value_heads"},
                             {"$0.alpha", "num_value_heads"}}),
      gdn("conv1d.(weight|bias)",
          {{"$0.query", "qk_dim"}, {"$0.key", "qk_dim"}, {"$0.value", "v_dim"}}),
      {.title = "MLA",
       .pattern = "linear_qkv_down_proj.(weight|bias)",
       .dim = 0,
       .sections = {{"linear_q_down_proj.$1", "q_lora_rank"},
                    {"linear_kv_down_proj.$1", "kv_lora_rank + qk_pos_emb_head_dim"}}},
      mla_rename("self_attention.linear_qkv_down_proj.layer_norm_(weight|bias)",
                 "input_layernorm.$1"),
      expert("mlp.experts.(linear_fc1|linear_fc2).(weight|bias)#(|_w|_v)",
             "mlp.experts.$1.$2{$3 + expert_offset}$4"),
      expert("mlp.experts.local_experts.#.*", "mlp.experts.local_experts.{$1 + expert_offset}.$2"),
      {.title = "MTP",
       .pattern = "mtp_model_layer.*",
       .sections = {{"transformer_layer.$1"}},
       .condition =
           FieldCondition{
               .field = "mamba_mtp", .equals = 0, .unknown = FieldCondition::Unknown::kApply}},
  };
}

}  // namespace fsdp
