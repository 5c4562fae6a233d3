#include "fsdp/layout/lanes.h"

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"

namespace fsdp {

LaneOrder LaneOrder::of(int64_t lanes, const Strategy& strategy, MeshShape ranks) {
  const int64_t num_ranks = ranks.outer * ranks.inner;
  if (!is_power_of_two(lanes))
    throw UsageError(concat("lanes is ", lanes, "; it must be a power of two"));
  if (!is_power_of_two(num_ranks) || num_ranks > lanes)
    throw UsageError(concat("lanes is ", lanes, " for ", num_ranks,
                            " ranks that compute a batch each; their number must be a power of "
                            "two, and at most that of the lanes"));
  LaneOrder order{.lanes = lanes, .micro_steps = lanes / num_ranks, .rank_stride = {}};
  int64_t stride = 1;
  const auto take = [&stride](int64_t& digit, int64_t size) {
    digit = stride;
    stride *= size;
  };
  const auto take_axes = [&](bool in_every_backward) {
    const auto is_next = [&](Placement gradient) {
      return (gradient == Placement::kShard) == in_every_backward;
    };
    if (is_next(strategy.gradient.inner)) take(order.rank_stride.inner, ranks.inner);
    if (is_next(strategy.gradient.outer)) take(order.rank_stride.outer, ranks.outer);
  };
  take_axes(true);
  take(order.step_stride, order.micro_steps);
  take_axes(false);
  return order;
}

}  // namespace fsdp
