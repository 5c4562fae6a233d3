// optim/parameter_rules.h: which rule is for which parameter.
#include "fsdp/optim/parameter_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/base/error.h"

namespace fsdp::parameter_rules_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<ParameterTraits>& model() {
  static const std::vector<ParameterTraits> parameters = {
      {{"embed.weight", "head.weight"}, 2}, {{"layers.0.norm.weight"}, 1},
      {{"layers.0.attn.weight"}, 2},        {{"layers.0.attn.bias"}, 1},
      {{"layers.0.conv.weight"}, 3},        {{"temperature"}, 0}};
  return parameters;
}

TEST(ParameterRules, SpareParametersOfFewerThanTwoDimensions) {
  const std::vector<HyperParameters> all = apply_rules({.weight_decay = 0.1}, model());
  const std::vector<double> expected = {0.1, 0, 0.1, 0, 0.1, 0};
  ASSERT_EQ(all.size(), expected.size());
  for (size_t i = 0; i < all.size(); ++i)
    EXPECT_EQ(all[i], (HyperParameters{expected[i], 1.0})) << i;
  for (const HyperParameters& each :
       apply_rules({.weight_decay = 0.1, .spares_vectors = false}, model()))
    EXPECT_EQ(each, (HyperParameters{0.1, 1.0}));
}

TEST(ParameterRules, TheFirstMatchCountsAlone) {
  const ParameterRuleOptions options{
      .weight_decay = 0.1,
      .rules = {{"layers.0.attn.*", 0.3, 2.0}, {"layers.*", std::nullopt, 0.5}, {"embed.*", 0.0}}};
  const std::vector<HyperParameters> all = apply_rules(options, model());
  EXPECT_EQ(all[0], (HyperParameters{0.0, 1.0, 2}));
  EXPECT_EQ(all[1], (HyperParameters{0.0, 0.5, 1})) << "spared: its rule says nothing about decay";
  EXPECT_EQ(all[2], (HyperParameters{0.3, 2.0, 0})) << "not 2.0 * 0.5";
  EXPECT_EQ(all[3], (HyperParameters{0.3, 2.0, 0})) << "a rule's decay is for vectors too";
  EXPECT_EQ(all[4], (HyperParameters{0.1, 0.5, 1}));
  EXPECT_EQ(all[5], (HyperParameters{0.0, 1.0})) << "no rule is for it";
}

TEST(ParameterRules, OneOfSeveralNamesIsEnough) {
  const auto all = apply_rules({.weight_decay = 0.1, .rules = {{"head.*", 0.0, 3.0}}}, model());
  EXPECT_EQ(all[0], (HyperParameters{0.0, 3.0, 0}));
}

TEST(ParameterRules, AlternativesOfAPatternAreOneRule) {
  const ParameterRuleOptions options{.weight_decay = 0.1,
                                     .rules = {{"*.bias|temperature", 0.0, 3.0}}};
  const std::vector<HyperParameters> all = apply_rules(options, model());
  EXPECT_EQ(all[3], (HyperParameters{0.0, 3.0, 0}));
  EXPECT_EQ(all[5], (HyperParameters{0.0, 3.0, 0}));
  EXPECT_EQ(all[4], (HyperParameters{0.1, 1.0}));
}

TEST(ParameterRules, ForNothingAreRefusedWithTheNearestName) {
  EXPECT_THAT([] { apply_rules({.rules = {{"*.bais"}}}, model()); },
              ThrowsMessage<UsageError>(HasSubstr(
                  "rule '*.bais' matches no parameter; the nearest is 'layers.0.attn.bias'")));
  EXPECT_THAT(
      [] {
        apply_rules({.rules = {{"*"}, {"unrelated.and.far.away"}}}, model());
      },
      ThrowsMessage<UsageError>(
          HasSubstr("'unrelated.and.far.away' matches no parameter; correct")));
  EXPECT_THAT([] { apply_rules({.rules = {{"*.bias"}}}, {}); },
              ThrowsMessage<UsageError>(HasSubstr("matches no parameter")));
  EXPECT_EQ(apply_rules({}, {}).size(), 0u);
}

TEST(ParameterRules, BehindOthersThatTakeAllAreRefused) {
  EXPECT_THAT(
      [] {
        apply_rules({.rules = {{"layers.*"}, {"*.bias", 0.0}}}, model());
      },
      ThrowsMessage<UsageError>(
          HasSubstr("rule '*.bias' has no effect, for earlier rules match all its parameters")));
  EXPECT_NO_THROW(apply_rules({.rules = {{"*.bias", 0.0}, {"layers.*"}}}, model()));
}

TEST(ParameterRules, NameFieldValueAndFix) {
  const auto refuses = [](const ParameterRuleOptions& options, const char* says) {
    EXPECT_THAT([&] { options.validate(); }, ThrowsMessage<UsageError>(HasSubstr(says)));
  };
  refuses({.weight_decay = -0.1}, "weight_decay is -0.1; it must be a number of 0 or more");
  refuses({.weight_decay = NAN}, "weight_decay is nan");
  refuses({.rules = {{"*.bias", -1.0}}}, "weight_decay of rule '*.bias' is -1; it must be");
  refuses({.rules = {{"*.bias", 0.0, INFINITY}}}, "rate_scale of rule '*.bias' is inf; it must be");
  refuses({.rules = {{"", 0.0}}}, "a rule's pattern is ''; use a name");
}

}  // namespace
}  // namespace fsdp::parameter_rules_test
