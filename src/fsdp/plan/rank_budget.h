// Answers what fits into the whole memory of a rank: how deep one plan may prefetch, and which
// plans fit on which numbers of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/peak_forecast.h"

namespace fsdp {

struct RankPlan {
  Forecast forecast;
  std::optional<PeakOptions> batch;  // if one is known,
  std::optional<PeakForecast> peak;  // and then the most memory of its step
  // The bytes with blocks that are computed again, where that helps and is worth saying.
  std::optional<int64_t> recomputed_bytes = std::nullopt;

  // On the device: the most of a step where a batch is known, else what stays.
  int64_t bytes() const { return peak ? peak->total() : forecast.bytes.total(); }
};

// The planner's own strategy and depth.
RankPlan plan_rank(const Planner& planner, const std::optional<PeakOptions>& batch);

// The planner's own strategy, with the deepest prefetch that fits. If none does, without prefetch:
// the least that such a rank needs.
RankPlan deepest_within(const Planner& planner, const std::optional<PeakOptions>& batch,
                        int64_t budget_bytes);

// Says what recomputation would bring, if it is a tenth or more.
void suggest_recompute(const Planner& planner, RankPlan& plan);

// The most sequences of a rank at a time with which the planner's own plan fits; 0: none does.
int64_t most_rows_within(const Planner& planner, PeakOptions batch, int64_t budget_bytes);

// Whether blocks are computed again in the backward: as the batch says, or only where nothing else
// fits.
enum class RecomputeSearch : uint8_t { kAsGiven, kIfNeeded };

struct FitQuestion {
  PlanOptions options;               // but for ranks and strategy
  std::vector<int64_t> rank_counts;  // to try, in this order
  int64_t num_answers = 1;           // as many of them as fit anything
  int64_t budget_bytes = 0;
  RecomputeSearch recompute = RecomputeSearch::kAsGiven;
  // The batch that a rank computes at a time if there are so many; nullopt: not known.
  std::function<std::optional<PeakOptions>(int64_t num_ranks)> batch_of;
};

struct FitAnswer {
  // The strategies that fit, of one number of ranks after the other; of each the one that receives
  // least first.
  std::vector<RankPlan> plans;
  int64_t least_bytes = 0;  // that any plan needs, also of those that do not fit
};

FitAnswer plans_that_fit(const ModelShape& model, const FitQuestion& question);

}  // namespace fsdp
