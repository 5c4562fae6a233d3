// The memory of one rank by kind, and what it receives in one step, before anything runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/model_shape.h"
#include "fsdp/plan/plan_options.h"
#include "fsdp/plan/traffic.h"

namespace fsdp {

// What of the optimizer's state is in the host's memory.
struct HostBytes {
  int64_t main_weight = 0;
  int64_t moments = 0;

  int64_t total() const { return main_weight + moments; }
};

// Bytes on the fullest rank; docs/plan.md has the formula of each.
struct MemoryBytes {
  int64_t weight = 0;
  int64_t main_weight = 0;
  int64_t main_grad = 0;
  int64_t moments = 0;
  int64_t weight_pool = 0;
  int64_t grad_pool = 0;

  HostBytes host;

  // On the device, that is without `host`.
  int64_t total() const;
};

struct Forecast {
  PlanOptions options;
  int64_t parameters = 0;
  int64_t num_units = 0;
  // What alignment and equal shards add to the weights, relative to the weights.
  double padding_fraction = 0;
  // No layout with the same granularity and alignment can have less.
  double padding_bound_fraction = 0;
  MemoryBytes bytes;
  Traffic traffic;
  // Units gathered ahead: as asked for, or the deepest that fits the budget.
  int64_t prefetch = 0;
  double plan_seconds = 0;
};

// Lays the model out once and forecasts any strategy on it. Holds its own copy of the model.
class Planner {
 public:
  // Throws UsageError for options that contradict each other.
  Planner(ModelShape model, const PlanOptions& options);

  const ModelShape& model() const { return model_; }
  const std::vector<GroupPlan>& groups() const { return groups_; }

  Forecast forecast() const { return forecast(options_.strategy); }
  Forecast forecast(const Strategy& strategy) const;

  // Every named strategy that the mesh can tell apart: those that shard the outer axis only where
  // there is one.
  std::vector<Forecast> forecast_all() const;

 private:
  ModelShape model_;
  PlanOptions options_;
  std::vector<GroupPlan> groups_;
  double padding_fraction_ = 0;
  double padding_bound_fraction_ = 0;
  double layout_seconds_ = 0;
};

}  // namespace fsdp
