// The question of a plan; the memory of one rank by kind, and how many bytes it receives in one
// step, before anything runs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/pool_options.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

// Deeper than any stack of units that is planned; a larger number is a typing error.
inline constexpr int64_t kMaxPrefetch = 4096;

struct PlanOptions {
  int64_t ranks = 1;  // in all
  int64_t outer = 1;  // along the outer axis; divides `ranks`, the rest is the inner (shard) axis
  int64_t ep = 1;     // that share out the experts of a layer, as MeshOptions has it
  int64_t tp = 1;     // that compute one loss together, as MeshOptions has it
  Strategy strategy = Strategy::optim_grads_params;
  DType compute = DType::kBFloat16;  // of parameters that name no dtype of their own
  PrecisionTypes precision = {};     // of all that is derived from parameters
  // How matrices of linear layers and experts are gathered, but for those of these names ("*" is
  // any text; ShardOptions::quantization).
  WeightRecipe weights = WeightRecipe::kPlain;
  std::vector<std::string> weights_except = {};
  double offload = 0;  // the fraction of each shard's moments and main weights on the host
  PoolKind pool = PoolKind::kPlanned;  // of gathered weights and unreduced gradients
  // Pool `double_buffer`: memory of units that are not like the most common one.
  OtherUnits other_units = OtherUnits::kOnDemand;
  int64_t prefetch = 1;  // units gathered ahead of the one that computes
  // Planned pool only: gather as far ahead as this many bytes allow, and ignore `prefetch`.
  std::optional<int64_t> pool_budget_bytes = std::nullopt;
  Granularity granularity = {};  // where shards may end
  // Muon updates the matrices of hidden layers, each by one owner (ShardOptions::matrices), with
  // products of this type, but for those of these names; nullopt: it does not. Their momentum has
  // the type of first moments.
  std::optional<DType> muon = std::nullopt;
  std::vector<std::string> muon_except = {};
  bool marks_changes = false;  // StepOptions::marks_changes
  // Neighbouring ranks that share a host, for what a step costs the network; 0: nobody asks.
  int64_t host_ranks = 0;

  // The grid of dense parameters, and that of a kind of grid.
  MeshShape mesh() const { return {.outer = outer, .inner = ranks / outer}; }
  MeshShape mesh(GridKind grid) const;
  // How many ranks own a slice each of a parameter of that grid, before it is sharded.
  int64_t owners(GridKind grid) const;

  // Throws UsageError with the field, its value and the fix.
  void validate() const;
};

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

// The cost of a step of one microbatch to the network of a cluster, for a rank, as NCCL moves it.
// Its bytes do not have those that layers exchange over ep and tp.
struct NetworkForecast {
  struct Part {
    int64_t near_bytes = 0;  // received from ranks of this host
    int64_t far_bytes = 0;   // received from other hosts, through this rank's card
    // Those that NCCL's rings would receive there, in the types that travel.
    int64_t ring_far_bytes = 0;
    int64_t launches = 0;
  };
  int64_t hosts = 1;
  int64_t sum_group = 1;  // neighbours whose gradients are added first (Communicator::sum_group)
  Part gathers = {};
  Part reductions = {};
  int64_t collectives = 0;
  int64_t connections = 0;    // over which a rank sends
  int64_t staging_bytes = 0;  // in which reductions receive, of all communicators
  int64_t nccl_bytes = 0;     // of NCCL's own, estimated
};

// The part of the optimizer's state in the host's memory.
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

// Muon's products in a step, by the ranks that own the matrices.
struct MatrixForecast {
  int64_t num_matrices = 0;
  double mean_flops = 0;       // of one Newton-Schulz iteration: the mean over the ranks,
  double most_flops = 0;       // and the most of one
  int64_t num_idle_ranks = 0;  // that own no matrix, as there are fewer matrices than ranks
};

struct Forecast {
  PlanOptions options;
  int64_t parameters = 0;
  int64_t num_units = 0;
  double padding_fraction = 0;        // by alignment and equal shards, relative to the weights
  double padding_bound_fraction = 0;  // the least of any layout with this granularity
  MemoryBytes bytes;
  MatrixForecast matrices;  // with PlanOptions::muon
  Traffic traffic;
  std::optional<NetworkForecast> network;  // with PlanOptions::host_ranks
  int64_t prefetch = 0;  // units gathered ahead: as asked for, or the deepest within the budget
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
  // The forecast with another depth, in place of the options' own and of their pool's budget.
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
