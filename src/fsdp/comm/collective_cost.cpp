#include "fsdp/comm/collective_cost.h"

#include <algorithm>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

// A ring enters and leaves a host once, over one card after the other.
int64_t far_bytes_of_ring(int64_t share, const SumOrder& order) {
  return share * (order.ranks - order.group) / order.group;
}

CollectiveCost gather_cost(const MovedBuffer& buffer, const SumOrder& order) {
  const int64_t share = buffer.bytes / order.ranks;
  const int64_t far = far_bytes_of_ring(share, order);
  return {.near_bytes = share * (order.ranks - 1) - far,
          .far_bytes = far,
          .ring_far_bytes = far,
          .launches = 1};
}

CollectiveCost reduction_cost(const MovedBuffer& buffer, const SumOrder& order) {
  const int64_t share = buffer.bytes / order.ranks;
  const int64_t share_numel = ceil_div(share, buffer.element_bytes);
  const int64_t largest = std::max(buffer.largest_share, share_numel);
  const auto pieces = ReductionPieces::of(order, largest, buffer.element_bytes, buffer.sum_bytes);
  const int64_t num_pieces = pieces.numel == 0 ? 0 : ceil_div(largest, pieces.numel);
  // A message to everybody and a kernel that adds, once for each hop.
  CollectiveCost cost{.ring_far_bytes = far_bytes_of_ring(share, order),
                      .launches = num_pieces * (order.has_two_hops() ? 4 : 2),
                      .staging_bytes = pieces.staging_bytes};
  const int64_t others = share * (order.ranks - 1);
  if (order.has_two_hops()) {
    cost.near_bytes = share * (order.group - 1) * order.num_groups();
    cost.far_bytes = share_numel * buffer.sum_bytes * (order.num_groups() - 1);
  } else {
    (order.group == 1 ? cost.far_bytes : cost.near_bytes) = others;
  }
  return cost;
}

}  // namespace

CollectiveCost& CollectiveCost::operator+=(const CollectiveCost& other) {
  near_bytes += other.near_bytes;
  far_bytes += other.far_bytes;
  ring_far_bytes += other.ring_far_bytes;
  launches += other.launches;
  staging_bytes = std::max(staging_bytes, other.staging_bytes);
  return *this;
}

CollectiveCost cost_of(Collective collective, const MovedBuffer& buffer, const SumOrder& order) {
  if (order.ranks == 1 || buffer.bytes == 0) return {};
  if (collective == Collective::kAllGather) return gather_cost(buffer, order);
  if (collective == Collective::kAllReduce && buffer.bytes <= kOneShotBytes) {
    CollectiveCost cost = gather_cost({.bytes = buffer.bytes * order.ranks}, order);
    cost.launches = 2;  // and the kernel that adds
    cost.ring_far_bytes = 2 * far_bytes_of_ring(buffer.bytes / order.ranks, order);
    cost.staging_bytes = buffer.bytes * order.ranks;
    return cost;
  }
  CollectiveCost cost = reduction_cost(buffer, order);
  if (collective == Collective::kAllReduce) cost += gather_cost(buffer, order);
  return cost;
}

}  // namespace fsdp
