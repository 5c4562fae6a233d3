#include "fsdp/plan/traffic.h"

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

constexpr Placement kR = Placement::kReplicate;
constexpr Placement kS = Placement::kShard;
constexpr Placement kP = Placement::kPartial;

// B (n-1)/n, without the product of two large numbers.
int64_t received(int64_t buffer_bytes, int64_t num_ranks) {
  return buffer_bytes - ceil_div(buffer_bytes, num_ranks);
}

AxisTraffic& add(AxisTraffic& sum, const AxisTraffic& other) {
  sum.all_gather += other.all_gather;
  sum.reduce_scatter += other.reduce_scatter;
  sum.all_reduce += other.all_reduce;
  return sum;
}

// One axis, one change of placement of a buffer that holds `bytes` when whole along this axis.
AxisTraffic change(Placement from, Placement to, int64_t bytes, int64_t num_ranks) {
  AxisTraffic moved;
  if (from == kS && to == kR) moved.all_gather = received(bytes, num_ranks);
  if (from == kP && to == kS) moved.reduce_scatter = received(bytes, num_ranks);
  if (from == kP && to == kR) moved.all_reduce = 2 * received(bytes, num_ranks);
  return moved;  // equal placements and Replicate to Shard (a local view) move nothing
}

// Both axes: a gather widens outer then inner, a reduction narrows inner then outer, so that the
// outer axis always sees the smaller buffer.
Traffic change(PlacementPair from, PlacementPair to, int64_t bytes, MeshShape mesh) {
  const bool inner_cut = from.inner == kS || to.inner == kS;
  const int64_t outer_bytes = inner_cut ? ceil_div(bytes, mesh.inner) : bytes;
  return {.inner = change(from.inner, to.inner, bytes, mesh.inner),
          .outer = change(from.outer, to.outer, outer_bytes, mesh.outer)};
}

}  // namespace

AxisTraffic Traffic::sum() const {
  AxisTraffic both = inner;
  return add(both, outer);
}

Traffic& Traffic::operator+=(const Traffic& other) {
  add(inner, other.inner);
  add(outer, other.outer);
  return *this;
}

Traffic group_traffic(const Strategy& strategy, MeshShape mesh, GroupBytes bytes,
                      int64_t num_gathers) {
  constexpr PlacementPair kWhole = {kR, kR};
  constexpr PlacementPair kUnreduced = {kP, kP};
  Traffic moved;
  const Traffic gather = change(strategy.parameter, kWhole, bytes.weight, mesh);
  for (int64_t i = 0; i < num_gathers; ++i) moved += gather;
  if (bytes.wire == 0) return moved;
  moved += change(kUnreduced, strategy.gradient, bytes.wire, mesh);
  moved += change(strategy.gradient, strategy.optimizer, bytes.wire, mesh);
  moved += change(strategy.optimizer, strategy.parameter, bytes.weight, mesh);
  return moved;
}

}  // namespace fsdp
