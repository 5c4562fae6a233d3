#include "fsdp/plan/plan_options.h"

#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

bool shards_outer_axis(const Strategy& strategy) {
  return strategy.parameter.outer == Placement::kShard ||
         strategy.gradient.outer == Placement::kShard ||
         strategy.optimizer.outer == Placement::kShard;
}

void check_floating(const char* field, std::optional<DType> dtype) {
  if (dtype && !is_floating(*dtype))
    throw UsageError(concat(field, " is ", name_of(*dtype), "; it must be a floating dtype"));
}

// Wider ones than the arithmetic of an update would be wasted.
void check_moment(const char* field, std::optional<DType> dtype) {
  if (dtype && (!is_floating(*dtype) || *dtype == DType::kFloat64))
    throw UsageError(concat(field, " is ", name_of(*dtype),
                            "; it must be fp32, bf16, fp16, fp8_e4m3, fp8_e5m2 or none"));
}

}  // namespace

void PlanOptions::validate() const {
  if (ranks < 1) throw UsageError(concat("ranks is ", ranks, "; it must be 1 or more"));
  if (outer < 1 || ranks % outer != 0)
    throw UsageError(concat("outer is ", outer, "; it must divide ranks = ", ranks));
  check_legal(strategy);
  if (outer == 1 && shards_outer_axis(strategy))
    throw UsageError(concat("strategy is ", to_text(strategy),
                            ", which shards the outer axis, but outer is 1; set outer to 2 or "
                            "more, or drop the outer sharding"));
  if (prefetch < 0 || prefetch > kMaxPrefetch)
    throw UsageError(
        concat("prefetch is ", prefetch, "; it must be from 0 to ", kMaxPrefetch, " units"));
  if (budget_bytes && pool != PoolKind::kPlanned)
    throw UsageError(concat("budget is ", *budget_bytes, " bytes, but the pool is ", name_of(pool),
                            "; only the planned pool chooses its depth by a budget"));
  if (budget_bytes && *budget_bytes < 1)
    throw UsageError(concat("budget is ", *budget_bytes, " bytes; it must be 1 or more"));
  check_floating("compute", compute);
  check_floating("main_params", precision.main_params);
  check_floating("main_grads", precision.main_grads);
  check_floating("grad_comm", precision.grad_comm);
  check_moment("first_moment", precision.first_moment);
  check_moment("second_moment", precision.second_moment);
  if (precision.second_moment && !precision.first_moment)
    throw UsageError(concat("second_moment is ", name_of(*precision.second_moment),
                            ", but first_moment is none; AdamW has both, SGD the first or none"));
  if (!(offload >= 0 && offload <= 1))
    throw UsageError(concat("offload is ", offload, "; it must be a fraction from 0 to 1"));
}

}  // namespace fsdp
