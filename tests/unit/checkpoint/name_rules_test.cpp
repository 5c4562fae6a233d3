// checkpoint/names/name_rules.h: patterns, fields, and the sections that rules make of a tensor.
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/check.h"

namespace fsdp::name_rules_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<TensorSection> sections(const NameRule& rule, const std::string& name,
                                    const std::vector<int64_t>& shape,
                                    const ModuleFields& fields = {}) {
  return NameRules({rule}, fields).sections(name, shape);
}

// The name that a rule with this pattern gives a tensor; its own without a match.
std::string renamed(const std::string& pattern, const std::string& to, const std::string& name,
                    const ModuleFields& fields = {}) {
  const NameRule rule{
      .title = "", .pattern = pattern, .sections = {{to}}, .scope = NameRule::Scope::kModelNames};
  return sections(rule, name, {2}, fields)[0].name;
}

// --- patterns ------------------------------------------------------------------------------------

TEST(NamePattern, DescribesTheEndOfANameFromAModuleOn) {
  EXPECT_EQ(renamed("mlp.weight", "[$0]", "layers.0.mlp.weight"), "layers.0.[mlp.weight]");
  EXPECT_EQ(renamed("mlp.weight", "[$0]", "mlp.weight"), "[mlp.weight]");
  EXPECT_EQ(renamed("*.weight", "[$0|$1]", "a.b.weight"), "[a.b.weight|a.b]");
  for (const char* other : {"my_mlp.weight", "mlp.weight_w"})
    EXPECT_EQ(renamed("mlp.weight", "[$0]", other), other);
}

TEST(NamePattern, KeepsWhatItsPlacesStandFor) {
  EXPECT_EQ(renamed("weight#(|_w|_v)", "[$1|$2]", "fc1.weight37_v"), "fc1.[37|_v]");
  EXPECT_EQ(renamed("weight#(|_w|_v)", "[$1|$2]", "fc1.weight37"), "fc1.[37|]");
  EXPECT_EQ(renamed("weight#(|_w|_v)", "[$1|$2]", "fc1.weight_v"), "fc1.weight_v");
  EXPECT_EQ(renamed("experts.#.*", "[$1|$2]", "mlp.experts.12.fc1.bias"), "mlp.[12|fc1.bias]");
  EXPECT_EQ(renamed("l?.(ab|a)*b", "[$1|$2|$3]", "l1.ab"), "[1|a|]");
}

TEST(NamePattern, FailsInATimeThatDoesNotExplodeWithItsStars) {
  // Nine stars over 200 characters are 10^15 ways to fail.
  const std::string name(200, 'a');
  EXPECT_EQ(renamed("*a*a*a*a*a*a*a*a*ab", "x", name), name);
}

// --- fields --------------------------------------------------------------------------------------

TEST(ModuleFields, AreThoseOfTheMostExactPatternThatStatesThem) {
  const ModuleFields fields = {{"decoder.layers.1", {{"rank", 7}}},
                               {"decoder.layers.*", {{"rank", 24}, {"gated", 1}}},
                               {"*", {{"rank", 1}, {"offset", 8}}},
                               {"decoder.layers.?", {{"gated", 0}}}};
  const auto field_of = [&](const std::string& module, const std::string& field) {
    return renamed("w#", concat("{$1 + ", field, "}"), concat(module, ".w0"), fields);
  };
  EXPECT_EQ(field_of("decoder.layers.1", "rank"), "decoder.layers.1.7");
  EXPECT_EQ(field_of("decoder.layers.12", "rank"), "decoder.layers.12.24");
  EXPECT_EQ(field_of("output", "rank"), "output.1");
  EXPECT_EQ(field_of("decoder.layers.1", "offset"), "decoder.layers.1.8");
  EXPECT_EQ(field_of("decoder.layers.1", "gated"), "decoder.layers.1.0") << "the later of two";
  EXPECT_EQ(field_of("decoder.layers.12", "gated"), "decoder.layers.12.1");
  EXPECT_THAT([&] { field_of("output", "gated"); }, ThrowsMessage<Error>(HasSubstr("is unknown")));
}

TEST(FieldSum, AddsNumbersAndFields) {
  const ModuleFields fields = {{"a", {{"x", 5}, {"y_2", -2}}}};
  const auto sum_of = [&](const std::string& text) {
    return renamed("w#", concat("{$1 + ", text, "}"), "a.w0", fields);
  };
  EXPECT_EQ(sum_of("24"), "a.24");
  EXPECT_EQ(sum_of(" x+ 3 +y_2"), "a.6");
  for (const char* text : {"", "x +", "+ x", "x y", "x - 1", "-1", "2x", "99999999999999999999"})
    EXPECT_THROW(sum_of(text), UsageError) << text;
  EXPECT_THAT([&] { sum_of("x + y_3"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("the field 'y_3' of the module of tensor 'a.w0' "
                                                   "is unknown"),
                                         HasSubstr("there is 'y_2'"))));
}

// --- sections ------------------------------------------------------------------------------------

TEST(NameRules, DivideADimBySizes) {
  const NameRule rule{
      .title = "", .pattern = "qkv", .dim = 1, .sections = {{"q", "4"}, {"k", "kv"}, {"v", "kv"}}};
  EXPECT_THAT(
      sections(rule, "a.qkv", {2, 10}, {{"a", {{"kv", 3}}}}),
      ElementsAre(TensorSection{"a.q", {2, 4}, {0, 0}}, TensorSection{"a.k", {2, 3}, {0, 4}},
                  TensorSection{"a.v", {2, 3}, {0, 7}}));
  EXPECT_THAT(sections(rule, "a.other", {2, 10}),
              ElementsAre(TensorSection{"a.other", {2, 10}, {0, 0}}));
}

TEST(NameRules, GiveEqualPartsOfWhatIsLeft) {
  const NameRule rule{
      .title = "", .pattern = "x", .dim = 0, .sections = {{"a"}, {"b", "3"}, {"c"}}};
  EXPECT_THAT(sections(rule, "x", {7}),
              ElementsAre(TensorSection{"a", {2}, {0}}, TensorSection{"b", {3}, {2}},
                          TensorSection{"c", {2}, {5}}));
  EXPECT_THAT(sections(rule, "x", {3}),
              ElementsAre(TensorSection{"a", {0}, {0}}, TensorSection{"b", {3}, {0}},
                          TensorSection{"c", {0}, {3}}));
}

TEST(NameRules, RenameTensorsOfAnyShape) {
  const NameRule rule{.title = "", .pattern = "old.*", .sections = {{"new.$1"}}};
  EXPECT_THAT(sections(rule, "m.old.scale", {}), ElementsAre(TensorSection{"m.new.scale", {}, {}}));
  EXPECT_THAT(sections(rule, "old.w", {0, 2}), ElementsAre(TensorSection{"new.w", {0, 2}, {0, 0}}));
}

TEST(NameRules, AreAppliedOneAfterTheOther) {
  const NameRules rules({{.title = "", .pattern = "w", .dim = 0, .sections = {{"a"}, {"b"}}},
                         {.title = "", .pattern = "b", .dim = 1, .sections = {{"b1", "1"}, {"b2"}}},
                         {.title = "", .pattern = "b2", .sections = {{"c"}}}});
  EXPECT_THAT(rules.sections("w", std::vector<int64_t>{4, 3}),
              ElementsAre(TensorSection{"a", {2, 3}, {0, 0}}, TensorSection{"b1", {2, 1}, {2, 0}},
                          TensorSection{"c", {2, 2}, {2, 1}}));
}

TEST(NameRules, ApplyOnlyWhereTheirConditionHolds) {
  NameRule rule{.title = "",
                .pattern = "w",
                .sections = {{"v"}},
                .condition = FieldCondition{.field = "gated", .equals = 1}};
  const ModuleFields fields = {{"on", {{"gated", 1}}}, {"off", {{"gated", 0}}}};
  const auto name = [&](const std::string& tensor) {
    return sections(rule, tensor, {2}, fields)[0].name;
  };
  EXPECT_EQ(name("on.w"), "on.v");
  EXPECT_EQ(name("off.w"), "off.w");
  EXPECT_EQ(name("who.w"), "who.w");
  rule.condition->unknown = FieldCondition::Unknown::kApply;
  EXPECT_EQ(name("who.w"), "who.v");
  EXPECT_EQ(name("off.w"), "off.w");
  rule.condition = FieldCondition{.field = "gated"};
  EXPECT_EQ(name("off.w"), "off.v");
  EXPECT_EQ(name("who.w"), "who.w");
}

TEST(NameRules, LeaveACheckpointsNamesWhereTheyAreForModelNames) {
  const NameRules rules({{.title = "",
                          .pattern = "w#",
                          .sections = {{"w{$1 + offset}"}},
                          .scope = NameRule::Scope::kModelNames},
                         {.title = "", .pattern = "x", .sections = {{"y"}}}},
                        {{"*", {{"offset", 4}}}});
  EXPECT_EQ(rules.sections("m.w3", std::vector<int64_t>{2})[0].name, "m.w7");
  EXPECT_EQ(rules.sections_of_stored("m.w7", std::vector<int64_t>{2})[0].name, "m.w7");
  EXPECT_EQ(rules.sections_of_stored("m.x", std::vector<int64_t>{2})[0].name, "m.y");
}

TEST(NameRules, RefuseOddSizesForEqualParts) {
  const NameRule rule{.title = "SwiGLU", .pattern = "w", .dim = 0, .sections = {{"a"}, {"b"}}};
  EXPECT_THAT(
      [&] {
        sections(rule, "m.w", {5, 3});
      },
      ThrowsMessage<Error>(
          HasSubstr("tensor 'm.w' of shape [5, 3] has 5 along dim 0 for the 2 equal sections of "
                    "rule 'SwiGLU', and 5 is not divisible by 2; correct the shape")));
}

TEST(NameRules, RefuseSizesThatAreNotTheTensors) {
  const NameRule rule{
      .title = "MLA", .pattern = "w", .dim = 0, .sections = {{"a", "24"}, {"b", "kv"}}};
  const ModuleFields fields = {{"m", {{"kv", 40}}}, {"n", {{"kv", -1}}}};
  EXPECT_THAT(
      [&] {
        sections(rule, "m.w", {60, 3}, fields);
      },
      ThrowsMessage<Error>(HasSubstr("tensor 'm.w' of shape [60, 3] has 60 along dim 0, "
                                     "but rule 'MLA' divides it into [24, 40]; correct")));
  EXPECT_THAT([&] { sections(rule, "n.w", {23}, fields); },
              ThrowsMessage<Error>(HasSubstr("would get a section of -1")));
  EXPECT_THAT([&] { sections(rule, "o.w", {64}, fields); },
              ThrowsMessage<Error>(HasSubstr("the field 'kv' of the module of tensor 'o.w'")));
  // Equal parts of less than nothing.
  const NameRule rest{.title = "", .pattern = "w", .dim = 0, .sections = {{"a", "9"}, {"b"}}};
  EXPECT_THAT(
      [&] { sections(rest, "w", {8}); },
      ThrowsMessage<Error>(HasSubstr("has 8 along dim 0, but rule 'w' divides it into [9, 0]")));
}

TEST(NameRules, RefuseADimThatTheTensorDoesNotHave) {
  const NameRule rule{.title = "", .pattern = "w", .dim = 1, .sections = {{"a"}, {"b"}}};
  EXPECT_THAT(
      [&] { sections(rule, "w", {4}); },
      ThrowsMessage<Error>(HasSubstr(
          "tensor 'w' of shape [4] has no dim 1, which rule 'w' divides; correct its dim")));
  EXPECT_THROW(sections(rule, "w", {}), Error);
}

TEST(NameRules, RefuseNamesThatWouldChangeAgainWhenRead) {
  const NameRule rule{.title = "", .pattern = "*.w", .sections = {{"$1.x.w"}}};
  EXPECT_THAT([&] { sections(rule, "m.w", {4}); },
              ThrowsMessage<Error>(HasSubstr("tensor 'm.w' would be stored as 'm.x.w', which rule "
                                             "'*.w' would change again when it is read")));
}

TEST(NameRules, RefuseIndicesThatAreNoNumbers) {
  const ModuleFields fields = {{"*", {{"offset", -4}}}};
  NameRule rule{.title = "",
                .pattern = "w*",
                .sections = {{"w{$1 + offset}"}},
                .scope = NameRule::Scope::kModelNames};
  EXPECT_THAT([&] { sections(rule, "w_x", {4}, fields); },
              ThrowsMessage<Error>(HasSubstr("'_x' in the name of tensor 'w_x' is not a whole "
                                             "number")));
  EXPECT_THAT([&] { sections(rule, "w3", {4}, fields); },
              ThrowsMessage<Error>(HasSubstr("'3' in the name of tensor 'w3' would become -1")));
}

TEST(NameRules, RefuseRulesThatCannotBeRead) {
  const auto refuses = [](const NameRule& rule, const std::string& why) {
    const NameRule fine{.title = "", .pattern = "a", .sections = {{"b"}}};
    EXPECT_THAT(
        [&] {
          NameRules({fine, rule});
        },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("rules[1]: "), HasSubstr(why))));
  };
  for (const auto& [pattern, why] : std::vector<std::pair<std::string, std::string>>{
           {"", "give the end of a tensor name"},
           {"a(b", "add the missing ')'"},
           {"a)b", "write ')' only in a choice"},
           {"a|b", "write '|' only in a choice"},
           {"(a*|b)", "only texts and | may stand between ( and )"},
           {"##########", "it has 10 places; 9 are possible"}})
    refuses({.title = "", .pattern = pattern, .sections = {{"b"}}},
            concat("pattern is '", pattern, "'; ", why));
  refuses({.title = "", .pattern = "a", .sections = {}}, "rule 'a' has no sections");
  refuses({.title = "", .pattern = "a", .dim = -1, .sections = {{"b"}, {"c"}}}, "dim is -1");
  refuses({.title = "", .pattern = "a", .sections = {{""}}}, "name is ''");
  refuses({.title = "", .pattern = "a#", .sections = {{"b$2"}}}, "its pattern has 1 places, so $2");
  refuses({.title = "", .pattern = "a#", .sections = {{"b$"}}}, "write places as $0 to $9");
  refuses({.title = "", .pattern = "a#", .sections = {{"b{$1 + x"}}}, "add the missing '}'");
  refuses({.title = "", .pattern = "a#", .sections = {{"b{$1}"}}}, "write sums as {$2 + field}");
  refuses({.title = "", .pattern = "a#", .sections = {{"b{x + $1}"}}}, "write places as $0 to $9");
  refuses({.title = "", .pattern = "a#", .sections = {{"b{$1 + }"}}}, "is not a sum");
  refuses({.title = "", .pattern = "a", .sections = {{"b", "x y"}, {"c"}}}, "is not a sum");
  refuses({.title = "", .pattern = "a", .sections = {{"b"}}, .condition = FieldCondition{}},
          "the condition has no field");
}

TEST(NameRules, StoreEveryTensorUnderANameOfItsOwn) {
  const NameRules rules({{.title = "", .pattern = "w", .dim = 0, .sections = {{"a"}, {"b"}}}});
  const std::vector<NamedShape> fine = {{"m.w", {4}}, {"n.w", {4}}, {"n.c", {3}}};
  EXPECT_NO_THROW(check_unique(rules, fine));
  const std::vector<NamedShape> twice = {{"m.w", {4}}, {"m.b", {3}}};
  EXPECT_THAT([&] { check_unique(rules, twice); },
              ThrowsMessage<Error>(HasSubstr(
                  "tensors 'm.w' and 'm.b' would both be stored as 'm.b'; correct the rules")));
}

}  // namespace
}  // namespace fsdp::name_rules_test
