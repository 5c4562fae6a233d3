// What a plan is made for: the ranks, the strategy, the types and the pool.
#pragma once

#include <cstdint>
#include <optional>

#include "fsdp/base/dtype.h"
#include "fsdp/layout/granularity.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/bucket_pool.h"

namespace fsdp {

// Deeper than any stack of units that is planned; a larger number is a typing error.
inline constexpr int64_t kMaxPrefetch = 4096;

// The types of a group's buffers; docs/plan.md says which buffer each one sets.
struct PrecisionOptions {
  // Of parameters that name no dtype of their own.
  DType compute = DType::kBFloat16;
  // Main weights. nullopt: none, the optimizer updates the weights themselves.
  std::optional<DType> main_params = DType::kFloat32;
  // Main gradients. nullopt: the parameter's dtype.
  std::optional<DType> main_grads = std::nullopt;
  // What gradients travel in. nullopt: the main gradients' dtype.
  std::optional<DType> grad_comm = std::nullopt;
  // Each of the optimizer's two moments. nullopt: none.
  std::optional<DType> moments = DType::kFloat32;
};

struct PlanOptions {
  // Ranks in all.
  int64_t ranks = 1;
  // Ranks along the outer axis; divides `ranks`, the rest is the inner (shard) axis.
  int64_t outer = 1;
  // What is sharded.
  Strategy strategy = parse_strategy("optim_grads_params");
  PrecisionOptions precision = {};
  // Where gathered weights and unreduced gradients live.
  PoolKind pool = PoolKind::kPlanned;
  // Units gathered ahead of the one that computes.
  int64_t prefetch = 1;
  // Planned pool only: gather as far ahead as this many bytes allow, and ignore `prefetch`.
  std::optional<int64_t> budget_bytes = std::nullopt;
  // Where a shard may end.
  Granularity granularity = {};

  MeshShape mesh() const { return {.outer = outer, .inner = ranks / outer}; }

  // Throws UsageError with the field, its value and the fix.
  void validate() const;
};

}  // namespace fsdp
