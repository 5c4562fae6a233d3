// What fits into the whole memory of a rank.
#include "fsdp/plan/rank_budget.h"

#include <gtest/gtest.h>

#include <set>

#include "fsdp/plan/load_model.h"

namespace fsdp::rank_budget_test {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

Planner planner_of(const char* model, int64_t ranks, PoolKind pool = PoolKind::kPlanned) {
  PlanOptions options;
  options.ranks = ranks;
  options.pool = pool;
  return {load_model(model), options};
}

TEST(DeepestWithin, IsTheLastDepthThatFits) {
  const PeakOptions batch{.batch = {.rows = 1, .sequence = 512}};
  for (const PoolKind pool : {PoolKind::kPlanned, PoolKind::kMaxPool})
    for (const std::optional<PeakOptions>& given : {std::optional<PeakOptions>(), {batch}}) {
      const Planner planner = planner_of("llama-1b", 8, pool);
      const Strategy strategy = planner.forecast().options.strategy;
      for (const int64_t depth : {0, 2, 5}) {
        const int64_t deeper = planner.forecast(strategy, depth + 1).bytes.total();
        const int64_t more = deeper - planner.forecast(strategy, depth).bytes.total();
        RankPlan plan = deepest_within(planner, given, 100 * kGiB);
        const int64_t rest = plan.bytes() - plan.forecast.bytes.total();
        plan = deepest_within(planner, given, deeper + rest - 1);
        EXPECT_LE(plan.bytes(), deeper + rest - 1);
        EXPECT_TRUE(more == 0 || plan.forecast.prefetch == depth) << name_of(pool);
      }
    }
}

TEST(DeepestWithin, IsWithoutPrefetchWhereNothingFits) {
  const RankPlan plan = deepest_within(planner_of("llama-1b", 8), std::nullopt, 1000);
  EXPECT_EQ(plan.forecast.prefetch, 0);
  EXPECT_GT(plan.bytes(), 1000);
}

FitQuestion question(int64_t budget) {
  return {.options = {},
          .rank_counts = {1, 2, 4, 8, 16, 32},
          .num_answers = 2,
          .budget_bytes = budget,
          .recompute = RecomputeSearch::kIfNeeded,
          .batch_of = [](int64_t) { return std::nullopt; }};
}

TEST(PlansThatFit, AreOfTheFewestRanks) {
  const ModelShape model = load_model("llama-1b");
  const FitAnswer answer = plans_that_fit(model, question(8 * kGiB));
  std::set<int64_t> ranks;
  for (const RankPlan& plan : answer.plans) {
    EXPECT_LE(plan.bytes(), 8 * kGiB);
    ranks.insert(plan.forecast.options.ranks);
  }
  ASSERT_EQ(ranks.size(), 2u);
  // The ones before fit nothing.
  FitQuestion fewer = question(8 * kGiB);
  fewer.rank_counts = {*ranks.begin() / 2};
  const FitAnswer none = plans_that_fit(model, fewer);
  EXPECT_TRUE(none.plans.empty());
  EXPECT_GT(none.least_bytes, 8 * kGiB);
}

TEST(PlansThatFit, ComeByTraffic) {
  const FitAnswer answer = plans_that_fit(load_model("llama-1b"), question(100 * kGiB));
  ASSERT_EQ(answer.plans.size(), 1u + 4u);  // one rank has nothing to shard over
  for (size_t i = 2; i < answer.plans.size(); ++i)
    EXPECT_GE(answer.plans[i].forecast.traffic.sum().total(),
              answer.plans[i - 1].forecast.traffic.sum().total());
}

TEST(PlansThatFit, RecomputeOnlyWhereTheyMust) {
  const ModelShape model = load_model("llama-1b");
  FitQuestion asked = question(0);
  asked.rank_counts = {8};
  asked.batch_of = [](int64_t) { return PeakOptions{.batch = {.rows = 4, .sequence = 4096}}; };
  asked.budget_bytes = 100 * kGiB;
  for (const RankPlan& plan : plans_that_fit(model, asked).plans)
    EXPECT_FALSE(plan.batch->recomputes_blocks);
  // With all activations it needs more than this, with those of one block less.
  asked.budget_bytes = 16 * kGiB;
  const FitAnswer tight = plans_that_fit(model, asked);
  ASSERT_FALSE(tight.plans.empty());
  for (const RankPlan& plan : tight.plans) EXPECT_TRUE(plan.batch->recomputes_blocks);
  asked.recompute = RecomputeSearch::kAsGiven;
  EXPECT_TRUE(plans_that_fit(model, asked).plans.empty());
}

}  // namespace
}  // namespace fsdp::rank_budget_test
