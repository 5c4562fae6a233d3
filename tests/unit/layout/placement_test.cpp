// layout/strategy.h: which triples exist, how they are named and refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fsdp/base/error.h"
#include "fsdp/layout/strategy.h"

namespace fsdp::placement_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

PlacementPair pair_of(std::string_view text) { return parse_placement_pair(text).value(); }

Strategy triple(std::string_view parameter, std::string_view gradient, std::string_view optimizer) {
  return {.parameter = pair_of(parameter),
          .gradient = pair_of(gradient),
          .optimizer = pair_of(optimizer)};
}

TEST(Placement, TextRoundTripsForEveryPair) {
  for (const PlacementPair pair : kAllPlacementPairs) EXPECT_EQ(pair_of(to_text(pair)), pair);
  EXPECT_EQ(to_text({Placement::kReplicate, Placement::kShard}), "RS");
  for (const char* bad : {"", "R", "RX", "RSS", "rs", "R,S"}) {
    EXPECT_EQ(parse_placement_pair(bad), std::nullopt) << bad;
  }
}

TEST(Placement, CountsTheShardsOfEachPair) {
  const MeshShape mesh{.outer = 3, .inner = 8};
  EXPECT_EQ(num_shards(pair_of("RR"), mesh), 1);
  EXPECT_EQ(num_shards(pair_of("PP"), mesh), 1);
  EXPECT_EQ(num_shards(pair_of("PS"), mesh), 8);
  EXPECT_EQ(num_shards(pair_of("SR"), mesh), 3);
  EXPECT_EQ(num_shards(pair_of("SS"), mesh), 24);
}

TEST(Strategy, NamedRowsHaveTheDesignsPlacements) {
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"no_shard", "RR/PP/RR"},
      {"optim", "RR/PP/RS"},
      {"optim_grads", "RR/PS/RS"},
      {"optim_grads_params", "RS/PS/RS"},
      {"optim+hfsdp", "RR/PP/SS"},
      {"optim_grads+hfsdp", "RR/PS/SS"},
      {"optim_grads_params+hfsdp", "RS/PS/SS"},
  };
  ASSERT_EQ(named_strategies().size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const Strategy& row = named_strategies()[i];
    EXPECT_EQ(row.name, expected[i].first);
    EXPECT_EQ(parse_strategy(expected[i].second), row) << "three pairs find the named row";
    EXPECT_EQ(illegal_reason(row), std::nullopt);
    EXPECT_EQ(to_text(row), row.name);
    EXPECT_EQ(parse_strategy(row.name), row);
  }
  EXPECT_EQ(parse_strategy("optim_grads+hsdp"), Strategy::optim_grads);
  static_assert(Strategy::optim.optimizer.inner == Placement::kShard, "usable at compile time");
  // Other legal triples are as good: weights sharded over both axes, gradients kept whole, ...
  for (const char* text : {"SS/PS/SS", "SS/SS/SS", "RS/PP/RS", "RR/SS/SS"}) {
    EXPECT_EQ(parse_strategy(text).name, "custom");
    EXPECT_EQ(to_text(parse_strategy(text)), text);
  }
}

TEST(Strategy, HfsdpShardsTheOptimizerOverTheOuterAxisAndKeepsAName) {
  EXPECT_EQ(Strategy::optim.hfsdp(), parse_strategy("optim+hfsdp"));
  EXPECT_EQ(Strategy::optim_grads_params.hfsdp(), parse_strategy("optim_grads_params+hfsdp"));
  EXPECT_EQ(Strategy::optim.hfsdp().hfsdp(), Strategy::optim.hfsdp());
  const Strategy custom = parse_strategy("RS/PP/RS").hfsdp();
  EXPECT_EQ(custom.name, "custom");
  EXPECT_EQ(to_text(custom), "RS/PP/SS");
  EXPECT_THAT([] { Strategy::no_shard.hfsdp(); },
              ThrowsMessage<UsageError>(HasSubstr("optimizer placement SR shards the outer axis")));
}

TEST(Strategy, ExactlyTheTriplesThatObeyTheFourRulesAreLegal) {
  // Per axis: parameter and optimizer are R or S, the gradient P or S, and the optimizer is S where
  // either of the others is. That leaves 1 (optimizer R) + 4 (optimizer S) choices per axis. Outer
  // S then needs inner S in the same buffer.
  int num_legal = 0;
  for (const PlacementPair parameter : kAllPlacementPairs) {
    for (const PlacementPair gradient : kAllPlacementPairs) {
      for (const PlacementPair optimizer : kAllPlacementPairs) {
        const Strategy strategy{
            .parameter = parameter, .gradient = gradient, .optimizer = optimizer};
        if (!illegal_reason(strategy)) ++num_legal;
      }
    }
  }
  // Inner R,P,R: outer must be R,P,R (1). Inner optimizer S: outer R,P,R (4) plus outer optimizer S
  // where parameter and gradient are S on the outer axis only if they are on the inner one:
  // per inner choice 1, 2, 2, 4 (9).
  EXPECT_EQ(num_legal, 1 + 4 + 9);
}

TEST(Strategy, RefusesWithASentenceThatNamesBufferValueAndFix) {
  const auto reason = [](const Strategy& strategy) {
    return illegal_reason(strategy).value_or("");
  };
  EXPECT_THAT(reason(triple("RP", "PS", "RS")),
              AllOf(HasSubstr("parameter placement RP"), HasSubstr("use R or S")));
  EXPECT_THAT(reason(triple("RR", "PS", "PS")),
              AllOf(HasSubstr("optimizer placement PS"), HasSubstr("only gradients are sums")));
  EXPECT_THAT(reason(triple("RR", "RS", "RS")), AllOf(HasSubstr("gradient placement RS"),
                                                      HasSubstr("use P (reduced once per step)")));
  EXPECT_THAT(reason(triple("RR", "PP", "SR")), AllOf(HasSubstr("optimizer placement SR"),
                                                      HasSubstr("inner one, which is cut first")));
  EXPECT_THAT(reason(triple("RS", "PP", "RR")), AllOf(HasSubstr("parameter placement RS"),
                                                      HasSubstr("shard the optimizer there too")));
  EXPECT_THAT(reason(triple("RR", "SS", "RS")), HasSubstr("gradient placement SS shards an axis"));
  EXPECT_THROW(check_legal(triple("RS", "PP", "RR")), UsageError);
}

TEST(Strategy, HasTheNamesOfOtherProgramsToo) {
  EXPECT_EQ(parse_strategy("zero1"), Strategy::optim);
  EXPECT_EQ(parse_strategy("zero2"), Strategy::optim_grads);
  for (const char* name : {"zero3", "ZeRO-3", "fsdp", "hsdp"})
    EXPECT_EQ(to_text(parse_strategy(name)), "optim_grads_params") << name;
}

TEST(Strategy, UnknownNamesSuggestTheNearest) {
  EXPECT_THAT([] { parse_strategy("optim_grad"); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("'optim_grad' is unknown"),
                                              HasSubstr("did you mean 'optim_grads'?"))));
  EXPECT_THAT([] { parse_strategy("pipeline"); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("use one of no_shard, optim, optim_grads"),
                                              ::testing::Not(HasSubstr("did you mean")))));
  EXPECT_THAT([] { parse_strategy("no_shard+hfsdp"); },
              ThrowsMessage<UsageError>(HasSubstr("optimizer placement SR shards the outer axis")));
  for (const char* bad : {"", "RS/PS", "RS/PS/SX", "optim+hfsdp+hsdp", "optim+hfsdp+hfsdp"}) {
    EXPECT_THROW(parse_strategy(bad), UsageError) << bad;
  }
}

}  // namespace
}  // namespace fsdp::placement_test
