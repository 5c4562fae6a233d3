#include "fsdp/plan/path_traffic.h"

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

// B (n-1)/n, without the product of two large numbers.
int64_t received(int64_t buffer_bytes, int64_t num_ranks) {
  return buffer_bytes - ceil_div(buffer_bytes, num_ranks);
}

}  // namespace

AxisTraffic& add(AxisTraffic& sum, const AxisTraffic& other) {
  sum.all_gather += other.all_gather;
  sum.reduce_scatter += other.reduce_scatter;
  sum.all_reduce += other.all_reduce;
  return sum;
}

AxisTraffic axis_traffic(Placement from, Placement to, int64_t bytes, int64_t num_ranks) {
  constexpr Placement kR = Placement::kReplicate;
  constexpr Placement kS = Placement::kShard;
  constexpr Placement kP = Placement::kPartial;
  AxisTraffic moved;
  if (from == kS && to == kR) moved.all_gather = received(bytes, num_ranks);
  if (from == kP && to == kS) moved.reduce_scatter = received(bytes, num_ranks);
  if (from == kP && to == kR) moved.all_reduce = 2 * received(bytes, num_ranks);
  return moved;  // equal placements and Replicate to Shard (a local view) move nothing
}

Traffic path_traffic(PlacementPair from, PlacementPair to, int64_t bytes, MeshShape mesh) {
  const bool inner_cut = from.inner == Placement::kShard || to.inner == Placement::kShard;
  const int64_t outer_bytes = inner_cut ? ceil_div(bytes, mesh.inner) : bytes;
  return {.inner = axis_traffic(from.inner, to.inner, bytes, mesh.inner),
          .outer = axis_traffic(from.outer, to.outer, outer_bytes, mesh.outer)};
}

}  // namespace fsdp
