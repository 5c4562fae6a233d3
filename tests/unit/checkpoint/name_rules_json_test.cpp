// checkpoint/names/name_tables.h: tables of rules that people write.
#include "fsdp/checkpoint/format/tensor_boxes.h"
#include "fsdp/checkpoint/names/name_tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"

namespace fsdp::name_rules_json_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

TEST(NameRulesJson, SaysEverythingARuleCanSay) {
  const NameRules rules = parse_name_rules(R"json({
    "rules": [
      {"title": "SwiGLU", "pattern": "fc1.(weight|bias)", "dim": 1,
       "sections": [{"name": "$0_w"}, {"name": "$0_v", "size": 4},
                    {"name": "$0_x", "size": "a + 2"}],
       "when": {"field": "gated", "equals": 1, "unknown": "apply"}},
      {"pattern": "experts.#.*", "rename": "experts.{$1 + first}.$2", "scope": "model"},
      {"pattern": "b", "sections": [{"name": "c"}, {"name": "d"}], "when": {"field": "x"}}
    ],
    "fields": [{"modules": "layers.*", "values": {"a": 3, "first": -8}}]})json",
                                           "table.json");
  EXPECT_THAT(
      rules.rules(),
      ElementsAre(NameRule{.title = "SwiGLU",
                           .pattern = "fc1.(weight|bias)",
                           .dim = 1,
                           .sections = {{"$0_w"}, {"$0_v", "4"}, {"$0_x", "a + 2"}},
                           .condition = FieldCondition{.field = "gated",
                                                       .equals = 1,
                                                       .unknown = FieldCondition::Unknown::kApply}},
                  NameRule{.title = "",
                           .pattern = "experts.#.*",
                           .sections = {{"experts.{$1 + first}.$2"}},
                           .scope = NameRule::Scope::kModelNames},
                  NameRule{.title = "",
                           .pattern = "b",
                           .sections = {{"c"}, {"d"}},
                           .condition = FieldCondition{.field = "x"}}));
  EXPECT_THAT(rules.fields(), ElementsAre(FieldsOfModules{"layers.*", {{"a", 3}, {"first", -8}}}));
}

TEST(NameRulesJson, IsReadAsItWasWritten) {
  std::vector<NameRule> table = megatron_rules();
  table.push_back({.title = "",
                   .pattern = "x",
                   .dim = 2,
                   .sections = {{"a", "0"}, {"b", "12"}, {"c", "007"}, {"d", " f + 1"}}});
  table.push_back({.title = "", .pattern = "one", .sections = {{"a", "7"}}});
  const NameRules rules(table, {{"a.*", {{"f", 1}}}, {"*", {}}, {"a.*", {{"g", -3}}}});
  const NameRules read = parse_name_rules(name_rules_json(rules), "table");
  EXPECT_EQ(read.rules(), rules.rules());
  EXPECT_EQ(read.fields(), rules.fields());
  EXPECT_EQ(parse_name_rules(name_rules_json(NameRules()), "table").rules().size(), 0U);
}

TEST(NameRulesJson, KnowsTheTableOfMegatronByName) {
  const NameRules rules = parse_name_rules(
      R"({"rules": "megatron", "fields": [{"modules": "*", "values": {"expert_offset": 2}}]})",
      "t");
  EXPECT_EQ(rules.rules(), megatron_rules());
  EXPECT_EQ(rules.sections("mlp.experts.linear_fc2.weight1", std::vector<int64_t>{2})[0].name,
            "mlp.experts.linear_fc2.weight3");
}

TEST(NameRulesJson, RefusesEveryDefectInOneSentence) {
  const auto refuses = [](const std::string& text, const std::string& why) {
    EXPECT_THAT([&] { parse_name_rules(text, "table.json"); },
                ThrowsMessage<UsageError>(AllOf(StartsWith("table.json"), HasSubstr(why))))
        << text;
  };
  const auto refuses_rule = [&](const std::string& rule, const std::string& why) {
    refuses(R"({"rules": [{"pattern": "a", "rename": "b"}, )" + rule + "]}", why);
  };
  refuses("{", "not valid JSON");
  refuses("[]", "the document is []; it must be an object");
  refuses("{}", "rules is missing; add it");
  refuses(R"({"rules": [], "rules": []})", "has the key 'rules' twice");
  refuses(R"({"rules": "deepspeed"})", R"(rules is "deepspeed"; give a list of rules)");
  refuses(R"({"rules": 3})", "rules is 3; it must be an array");
  refuses(R"({"rule": []})", "rule is not a known field; did you mean 'rules'?");
  refuses_rule("7", "rules[1] is 7; it must be an object");
  refuses_rule(R"({"rename": "b"})", "rules[1].pattern is missing");
  refuses_rule(R"({"pattern": "a"})", "rules[1].sections is missing");
  refuses_rule(R"({"pattern": "a", "sections": []})", "rules[1]: rule 'a' has no sections");
  refuses_rule(R"({"pattern": "a(", "rename": "b"})", "rules[1]: pattern is 'a('");
  refuses_rule(R"({"pattern": "a", "rename": "b", "dim": 1})", "rules[1].dim is 1; a rule with");
  refuses_rule(R"({"pattern": "a", "rename": "b", "sections": []})", "rules[1].sections is []");
  refuses_rule(R"({"pattern": "a", "rename": "b", "axis": 1})",
               "rules[1].axis is not a known field");
  refuses_rule(R"({"pattern": "a", "rename": "b", "scope": "all"})", "use one of every, model");
  refuses_rule(R"({"pattern": "a", "rename": "b", "when": 1})", "rules[1].when is 1");
  refuses_rule(R"({"pattern": "a", "rename": "b", "when": {}})", "rules[1].when.field is missing");
  refuses_rule(R"({"pattern": "a", "rename": "b", "when": {"field": "x", "unknown": "no"}})",
               "use one of skip, apply");
  refuses_rule(R"({"pattern": "a", "sections": [{"name": "b", "size": -1}]})",
               "rules[1].sections[0].size is -1; it must be a whole number from 0 up");
  refuses_rule(R"({"pattern": "a", "sections": [{"name": "b", "size": ""}]})",
               "leave it out for an equal part");
  refuses_rule(R"({"pattern": "a", "sections": [{"name": "b", "size": "a * 2"}]})",
               "rules[1]: 'a * 2' is not a sum");
  refuses_rule(R"({"pattern": "a", "sections": [{"size": 1}]})", "sections[0].name is missing");
  refuses(R"({"rules": [], "fields": [{"modules": "a"}]})", "fields[0].values is missing");
  refuses(R"({"rules": [], "fields": [{"modules": "a", "values": [1]}]})",
          "fields[0].values is [1]; it must be an object");
  refuses(R"({"rules": [], "fields": [{"modules": "a", "values": {"x": true}}]})",
          "fields[0].values.x is true; it must be a whole number");
}

}  // namespace
}  // namespace fsdp::name_rules_json_test
