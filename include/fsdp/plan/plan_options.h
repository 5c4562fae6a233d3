// What a plan is made for: ranks, strategy, types and pool.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/comm/parameter_kind.h"
#include "fsdp/layout/granularity.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/pool_options.h"

namespace fsdp {

// Deeper than any stack of units that is planned; a larger number is a typing error.
inline constexpr int64_t kMaxPrefetch = 4096;

struct PlanOptions {
  // Ranks in all.
  int64_t ranks = 1;
  // Ranks along the outer axis; divides `ranks`, the rest is the inner (shard) axis.
  int64_t outer = 1;
  // Ranks that share out the experts of a layer, as MeshOptions has it.
  int64_t ep = 1;
  // Ranks that compute one loss together, as MeshOptions has it.
  int64_t tp = 1;
  // What is sharded.
  Strategy strategy = Strategy::optim_grads_params;
  // The dtype of parameters that name none of their own.
  DType compute = DType::kBFloat16;
  // The dtypes of everything that is derived from parameters.
  PrecisionTypes precision = {};
  // How matrices of linear layers and experts are gathered, but for those of these names ("*" is
  // any text), and where their shared scales come from (ShardOptions::quantization).
  WeightRecipe weights = WeightRecipe::kPlain;
  std::vector<std::string> weights_except = {};
  WeightScaling weight_scaling = WeightScaling::kCurrent;
  // The fraction of each shard's optimizer state (moments and main weights) that is on the host.
  double offload = 0;
  // Where gathered weights and unreduced gradients live.
  PoolKind pool = PoolKind::kPlanned;
  // Pool `double_buffer`: memory of units that are not like the most common one.
  OtherUnits other_units = OtherUnits::kOnDemand;
  // Units gathered ahead of the one that computes.
  int64_t prefetch = 1;
  // Planned pool only: gather as far ahead as this many bytes allow, and ignore `prefetch`.
  std::optional<int64_t> pool_budget_bytes = std::nullopt;
  // Where a shard may end.
  Granularity granularity = {};
  // Muon updates the matrices of hidden layers, each by one owner (ShardOptions::matrices), with
  // products of this type; nullopt: it does not. Their momentum has the type of first moments.
  std::optional<DType> muon = std::nullopt;
  // But for those of these names ("*" is any text).
  std::vector<std::string> muon_except = {};
  // StepOptions::marks_changes.
  bool marks_changes = false;

  // The grid of dense parameters, and that of a kind of grid.
  MeshShape mesh() const { return {.outer = outer, .inner = ranks / outer}; }
  MeshShape mesh(GridKind grid) const;
  // How many ranks own a slice each of a parameter of that grid, before it is sharded.
  int64_t owners(GridKind grid) const;

  // Throws UsageError with the field, its value and the fix.
  void validate() const;
};

}  // namespace fsdp
