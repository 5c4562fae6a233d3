#include "fsdp/plan/rank_budget.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <utility>

namespace fsdp {

namespace {

RankPlan with_peak(const Planner& planner, Forecast forecast,
                   const std::optional<PeakOptions>& batch) {
  RankPlan plan{.forecast = std::move(forecast), .batch = batch, .peak = std::nullopt};
  if (batch) plan.peak = forecast_peak(planner.model(), planner.groups(), plan.forecast, *batch);
  return plan;
}

// Without recomputation where that fits or is not to be tried, else with it.
RankPlan cheapest(const Planner& planner, const Strategy& strategy, const FitQuestion& question) {
  const Forecast forecast = planner.forecast(strategy);
  std::optional<PeakOptions> batch = question.batch_of(forecast.options.ranks);
  RankPlan plan = with_peak(planner, forecast, batch);
  const bool may_recompute = question.recompute == RecomputeSearch::kIfNeeded && batch &&
                             !batch->recomputes_blocks && plan.bytes() > question.budget_bytes;
  if (!may_recompute) return plan;
  batch->recomputes_blocks = true;
  return with_peak(planner, forecast, batch);
}

}  // namespace

RankPlan plan_rank(const Planner& planner, const std::optional<PeakOptions>& batch) {
  return with_peak(planner, planner.forecast(), batch);
}

void suggest_recompute(const Planner& planner, RankPlan& plan) {
  if (!plan.peak || plan.batch->recomputes_blocks) return;
  PeakOptions again = *plan.batch;
  again.recomputes_blocks = true;
  const int64_t bytes =
      forecast_peak(planner.model(), planner.groups(), plan.forecast, again).total();
  if (bytes < plan.bytes() - plan.bytes() / 10) plan.recomputed_bytes = bytes;
}

int64_t most_rows_within(const Planner& planner, PeakOptions batch, int64_t budget_bytes) {
  constexpr int64_t kMostRows = int64_t{1} << 20;
  const Forecast forecast = planner.forecast();
  const auto fits = [&](int64_t rows) {
    batch.batch.rows = rows;
    return forecast_peak(planner.model(), planner.groups(), forecast, batch).total() <=
           budget_bytes;
  };
  int64_t rows = 0;
  for (int64_t more = kMostRows; more > 0; more /= 2)
    if (fits(rows + more)) rows += more;
  return rows;
}

RankPlan deepest_within(const Planner& planner, const std::optional<PeakOptions>& batch,
                        int64_t budget_bytes) {
  const Strategy strategy = planner.forecast().options.strategy;
  const auto plan_with = [&](int64_t prefetch) {
    return with_peak(planner, planner.forecast(strategy, prefetch), batch);
  };
  RankPlan best = plan_with(0);
  if (best.bytes() > budget_bytes) return best;
  // Bytes grow with the depth, and no unit is further ahead than the last one.
  int64_t too_deep = best.forecast.num_units + 1;
  while (too_deep - best.forecast.prefetch > 1) {
    const int64_t middle = std::midpoint(best.forecast.prefetch, too_deep);
    RankPlan plan = plan_with(middle);
    if (plan.bytes() <= budget_bytes)
      best = std::move(plan);
    else
      too_deep = middle;
  }
  return best;
}

FitAnswer plans_that_fit(const ModelShape& model, const FitQuestion& question) {
  FitAnswer answer{.plans = {}, .least_bytes = std::numeric_limits<int64_t>::max()};
  int64_t num_answers = 0;
  for (const int64_t num_ranks : question.rank_counts) {
    PlanOptions options = question.options;
    options.ranks = num_ranks;
    const Planner planner(model, options);
    std::vector<RankPlan> fitting;
    for (const Strategy& strategy : planner.strategies()) {
      RankPlan plan = cheapest(planner, strategy, question);
      answer.least_bytes = std::min(answer.least_bytes, plan.bytes());
      if (plan.bytes() <= question.budget_bytes) fitting.push_back(std::move(plan));
    }
    if (fitting.empty()) continue;
    std::stable_sort(fitting.begin(), fitting.end(), [](const RankPlan& a, const RankPlan& b) {
      return a.forecast.traffic.sum().total() < b.forecast.traffic.sum().total();
    });
    std::move(fitting.begin(), fitting.end(), std::back_inserter(answer.plans));
    if (++num_answers == question.num_answers) break;
  }
  return answer;
}

}  // namespace fsdp
