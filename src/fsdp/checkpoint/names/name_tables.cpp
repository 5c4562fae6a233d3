#include "fsdp/checkpoint/names/name_tables.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr const char* kMegatron = "megatron";

// One of two words, or the fallback if the field is absent.
template <typename Value>
Value read_word(const JsonFields& fields, const char* field,
                std::initializer_list<std::pair<const char*, Value>> words, Value fallback) {
  if (!fields.has(field)) return fallback;
  const std::string given = fields.text(field);
  std::vector<std::string> known;
  for (const auto& [word, value] : words) {
    if (given == word) return value;
    known.emplace_back(word);
  }
  fields.refuse(field, concat("use one of ", join(known, ", ")));
}

SectionRule read_section(const JsonFields& fields, const nlohmann::json& object) {
  fields.allow_only({"name", "size"});
  SectionRule section{.name = fields.text("name")};
  if (!fields.has("size")) return section;
  if (object.at("size").is_string()) {
    section.size = fields.text("size");
    if (section.size.empty()) fields.refuse("size", "leave it out for an equal part");
  } else {
    if (!object.at("size").is_number_unsigned())
      fields.refuse("size",
                    "it must be a whole number from 0 up, or a sum of fields like \"a + b\"");
    section.size = std::to_string(fields.integer("size"));
  }
  return section;
}

FieldCondition read_condition(const JsonFields& fields) {
  fields.allow_only({"field", "equals", "unknown"});
  FieldCondition condition{.field = fields.text("field")};
  if (fields.has("equals")) condition.equals = fields.integer("equals");
  condition.unknown = read_word(
      fields, "unknown",
      {{"skip", FieldCondition::Unknown::kSkip}, {"apply", FieldCondition::Unknown::kApply}},
      FieldCondition::Unknown::kSkip);
  return condition;
}

NameRule read_rule(const JsonFields& fields) {
  fields.allow_only({"title", "pattern", "dim", "sections", "rename", "when", "scope"});
  NameRule rule{
      .title = fields.text_or("title", ""), .pattern = fields.text("pattern"), .sections = {}};
  if (fields.has("rename")) {
    for (const char* other : {"sections", "dim"})
      if (fields.has(other))
        fields.refuse(other, "a rule with \"rename\" divides nothing; leave one out");
    rule.sections.push_back({.name = fields.text("rename")});
  } else {
    rule.dim = fields.integer_or("dim", 0);
    const nlohmann::json& sections = fields.array("sections");
    for (size_t s = 0; s < sections.size(); ++s)
      rule.sections.push_back(read_section(fields.element("sections", s), sections[s]));
  }
  if (fields.has("when")) rule.condition = read_condition(fields.object("when"));
  rule.scope =
      read_word(fields, "scope",
                {{"every", NameRule::Scope::kEveryName}, {"model", NameRule::Scope::kModelNames}},
                NameRule::Scope::kEveryName);
  return rule;
}

std::vector<NameRule> read_rules(const JsonFields& fields, const nlohmann::json& document) {
  if (fields.has("rules") && document.at("rules").is_string()) {
    if (fields.text("rules") != kMegatron)
      fields.refuse("rules", concat("give a list of rules, or \"", kMegatron, "\""));
    return megatron_rules();
  }
  std::vector<NameRule> rules;
  const nlohmann::json& given = fields.array("rules");
  for (size_t i = 0; i < given.size(); ++i) rules.push_back(read_rule(fields.element("rules", i)));
  return rules;
}

ModuleFields read_module_fields(const JsonFields& fields) {
  ModuleFields result;
  if (!fields.has("fields")) return result;
  const nlohmann::json& given = fields.array("fields");
  for (size_t i = 0; i < given.size(); ++i) {
    const JsonFields entry = fields.element("fields", i);
    entry.allow_only({"modules", "values"});
    FieldsOfModules modules{.modules = entry.text("modules"), .values = {}};
    const JsonFields numbers = entry.object("values");
    for (const std::string& name : numbers.keys())
      modules.values[name] = numbers.integer(name.c_str());
    result.push_back(std::move(modules));
  }
  return result;
}

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

// A checkpoint already has the indices among all experts.
NameRule expert(std::string pattern, std::string name) {
  return {.title = "experts",
          .pattern = std::move(pattern),
          .sections = {{std::move(name)}},
          .scope = NameRule::Scope::kModelNames};
}

}  // namespace

NameRules parse_name_rules(std::string_view json_text, const std::string& source) {
  const nlohmann::json document = parse_json(json_text, source);
  const JsonFields fields(document, source, "");
  fields.allow_only({"rules", "fields"});
  std::vector<NameRule> rules = read_rules(fields, document);
  ModuleFields module_fields = read_module_fields(fields);
  try {
    return NameRules(std::move(rules), std::move(module_fields));
  } catch (const UsageError& error) {
    throw UsageError(concat(source, ": ", error.what()));
  }
}

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
