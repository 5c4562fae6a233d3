// Sharded training equals plain training: losses, gradients and weights.
#include "support/parity.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "support/parity_matrix.h"

namespace fsdp::parity_test {
namespace {

using testing::all_cases;
using testing::cases_to_run;
using testing::expect_equal_bits;
using testing::expect_parity;
using testing::ModelKind;
using testing::pairwise_cases;
using testing::ParityCase;
using testing::Precision;
using testing::RankOutcome;
using testing::train_plain;
using testing::train_threads;

class Parity : public ::testing::TestWithParam<ParityCase> {};

TEST_P(Parity, TrainsLikeAPlainModel) {
  const ParityCase& parity = GetParam();
  train_plain(parity);
  const std::vector<RankOutcome> outcomes = train_threads(parity);
  for (int rank = 0; rank < parity.ranks(); ++rank) {
    SCOPED_TRACE(rank);
    expect_parity(outcomes[static_cast<size_t>(rank)], parity, rank);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Parity, ::testing::ValuesIn(cases_to_run()),
                         [](const auto& each) { return each.param.name(); });

// The rule by which the subset was chosen, counted in another way than it is built.
TEST(ParityMatrix, SubsetHasEveryPairOfValues) {
  const auto properties = [](const ParityCase& parity) {
    return std::vector<std::string>{
        parity.strategy,
        std::to_string(parity.outer) + "x" + std::to_string(parity.inner),
        name_of(parity.model),
        std::string(name_of(parity.pool)),
        std::to_string(parity.microbatches),
        name_of(parity.precision),
        parity.lifetime == GradientLifetime::kStep ? "step" : "persistent",
        parity.gradient == GradientOf::kSumOverRanks ? "sum" : "mean",
        name_of(parity.updated_by)};
  };
  const auto pairs_of = [&](const std::vector<ParityCase>& cases) {
    std::set<std::string> pairs;
    for (const ParityCase& parity : cases) {
      const std::vector<std::string> values = properties(parity);
      for (size_t a = 0; a < values.size(); ++a)
        for (size_t b = a + 1; b < values.size(); ++b)
          pairs.insert(std::to_string(a) + values[a] + " " + std::to_string(b) + values[b]);
    }
    return pairs;
  };
  EXPECT_EQ(pairs_of(pairwise_cases()), pairs_of(all_cases()));
}

class SameBits : public ::testing::TestWithParam<ModelKind> {
 protected:
  static void expect_same(const ParityCase& a, const ParityCase& b) {
    SCOPED_TRACE(a.name() + " and " + b.name());
    const std::vector<RankOutcome> left = train_threads(a);
    const std::vector<RankOutcome> right = train_threads(b);
    for (size_t rank = 0; rank < left.size(); ++rank) expect_equal_bits(left[rank], right[rank]);
  }
};

// With one rank no strategy has anything to shard or to reduce.
TEST_P(SameBits, OnOneRankAsInAPlainModel) {
  for (const char* strategy : {"no_shard", "optim", "optim_grads_params+hfsdp", "SS/SS/SS"})
    for (const int microbatches : {1, 3})
      for (const Precision precision : {Precision::kFp32, Precision::kBf16, Precision::kBf16Wire,
                                        Precision::kBf16Grads, Precision::kBf16Alone}) {
        const ParityCase parity{.model = GetParam(),
                                .strategy = strategy,
                                .microbatches = microbatches,
                                .precision = precision};
        SCOPED_TRACE(parity.name());
        expect_parity(train_threads(parity).front(), parity, 0);
      }
}

TEST_P(SameBits, InAllPools) {
  for (const char* strategy : {"optim_grads", "optim_grads_params", "SS/SS/SS", "RS/PP/SS"}) {
    ParityCase parity{.model = GetParam(),
                      .strategy = strategy,
                      .outer = 2,
                      .inner = 2,
                      .pool = PoolKind::kOnDemand,
                      .microbatches = 3,
                      .precision = Precision::kBf16Wire};
    const std::vector<RankOutcome> expected = train_threads(parity);
    for (const PoolKind pool : {PoolKind::kDoubleBuffer, PoolKind::kMaxPool, PoolKind::kPlanned}) {
      parity.pool = pool;
      SCOPED_TRACE(parity.name());
      const std::vector<RankOutcome> actual = train_threads(parity);
      for (size_t rank = 0; rank < actual.size(); ++rank)
        expect_equal_bits(actual[rank], expected[rank]);
    }
  }
}

TEST_P(SameBits, WithGradientsThatComeAndGo) {
  for (const char* strategy : {"no_shard", "optim+hfsdp", "optim_grads", "optim_grads_params"}) {
    ParityCase parity{.model = GetParam(),
                      .strategy = strategy,
                      .outer = 2,
                      .inner = 2,
                      .microbatches = 3,
                      .precision = Precision::kBf16Wire};
    ParityCase step = parity;
    step.lifetime = GradientLifetime::kStep;
    expect_same(parity, step);
  }
}

// The weights' placement decides where they are gathered, not what is computed.
TEST_P(SameBits, WhetherWeightsAreShardedOrNot) {
  const ParityCase whole{
      .model = GetParam(), .strategy = "optim_grads", .inner = 3, .microbatches = 3};
  ParityCase sharded = whole;
  sharded.strategy = "optim_grads_params";
  expect_same(whole, sharded);
}

INSTANTIATE_TEST_SUITE_P(Models, SameBits,
                         ::testing::Values(ModelKind::kMlp, ModelKind::kLlama, ModelKind::kHybrid),
                         [](const auto& each) { return testing::name_of(each.param); });

}  // namespace
}  // namespace fsdp::parity_test
