// The memory of one rank by kind, and how many bytes it receives in one step, before anything runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/layout/strategy.h"
#include "fsdp/plan/model_shape.h"
#include "fsdp/plan/plan_options.h"

namespace fsdp {

struct GroupPlan;

// Bytes received by one rank. A gather or a reduce-scatter of B bytes over n ranks receives
// B (n-1)/n, an all-reduce twice that (a reduce-scatter and a gather): what any algorithm without
// redundant transfers moves. With shards of unequal length it is the mean over the ranks.
struct AxisTraffic {
  int64_t all_gather = 0;
  int64_t reduce_scatter = 0;
  int64_t all_reduce = 0;

  int64_t total() const { return all_gather + reduce_scatter + all_reduce; }
};

struct Traffic {
  AxisTraffic inner;
  AxisTraffic outer;
  // Over the axes of other grids, where parameters have some (Mesh::grid). What tokens cost on
  // their way between ranks of an ep or tp group is not in it.
  AxisTraffic tensor_inner = {};
  AxisTraffic expert_inner = {};
  AxisTraffic expert_outer = {};

  AxisTraffic sum() const;
  Traffic& operator+=(const Traffic& other);
};

// One group's unsharded buffers, in bytes.
struct GroupBytes {
  int64_t weight = 0;
  // In the type gradients travel in; 0 for a group without gradients.
  int64_t wire = 0;
  // Of quantised weights: the largest magnitudes that ranks combine after an update, whole on each.
  int64_t amaxes = 0;
};

// The step of one microbatch, from placements alone:
//   weights    sharded between uses: gathered before each use (`num_gathers` times). Where the
//              optimizer is sharded and the weights are not: gathered once, after the update;
//   gradients  first brought from Partial to their own placement, then to the optimizer's.
// The inner axis is cut first, so what crosses the outer axis is an inner shard wherever there is
// one.
Traffic group_traffic(const Strategy& strategy, MeshShape mesh, GroupBytes bytes,
                      int64_t num_gathers);

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
  int64_t workspace = 0;  // of Muon's products
  int64_t weight_pool = 0;
  int64_t grad_pool = 0;

  HostBytes host;

  // On the device, that is without `host`.
  int64_t total() const;
};

// What Muon multiplies in a step, by the ranks that own the matrices.
struct MatrixForecast {
  int64_t num_matrices = 0;
  // Of one Newton-Schulz iteration: the mean over the ranks, and the most of one.
  double mean_flops = 0;
  double most_flops = 0;
  // Ranks that own no matrix: there are fewer matrices than ranks.
  int64_t num_idle_ranks = 0;
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
  MatrixForecast matrices;  // with PlanOptions::muon
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
  const std::vector<GroupPlan>& groups() const { return *groups_; }

  Forecast forecast() const { return forecast(options_.strategy); }
  Forecast forecast(const Strategy& strategy) const;
  // The same with another depth, in place of the options' own and of their pool's budget.
  Forecast forecast(const Strategy& strategy, int64_t prefetch) const;

  // Every named strategy that the mesh can tell apart: those that shard the outer axis only where
  // there is one, and a single one for a single rank.
  std::vector<Strategy> strategies() const;
  std::vector<Forecast> forecast_all() const;

 private:
  Forecast forecast_with(PlanOptions options) const;

  ModelShape model_;
  PlanOptions options_;
  std::shared_ptr<const std::vector<GroupPlan>> groups_;
  double padding_fraction_ = 0;
  double padding_bound_fraction_ = 0;
  double layout_seconds_ = 0;
};

}  // namespace fsdp
