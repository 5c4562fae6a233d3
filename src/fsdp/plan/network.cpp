// The cost of a step to the network of a cluster: bytes on each kind of link, launches,
// connections, and the memory that NCCL takes for them.
#include <algorithm>
#include <array>
#include <utility>

#include "fsdp/base/integer.h"
#include "fsdp/comm/collective_cost.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/plan/group_plan.h"

namespace fsdp {

namespace {

// NCCL 2.28 takes on a host with NVLink, by its log of allocations
// (github.com/NVIDIA/nccl/issues/1685): 10 MiB for each of 16 channels in both directions of a
// ring; for each rank of the host with which messages are exchanged 14 MiB for each of 32 channels;
// for all other ranks together one memory.
constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr int64_t kRingBytes = 2 * 16 * 10 * kMebibyte;
constexpr int64_t kNearPeerBytes = 32 * 14 * kMebibyte;
constexpr int64_t kFarPeersBytes = 512 * kMebibyte;

constexpr std::array kGridAxes{GridAxis::kInner, GridAxis::kOuter, GridAxis::kOwners};

// Ranks `stride` apart.
struct AxisRanks {
  int64_t stride;
  int64_t size;
};

AxisRanks ranks_along(GridAxis axis, GridKind grid, const PlanOptions& options) {
  const MeshShape mesh = options.mesh(grid);
  const int64_t owners = options.owners(grid);
  if (axis == GridAxis::kOwners) return {1, owners};
  return axis == GridAxis::kInner ? AxisRanks{owners, mesh.inner}
                                  : AxisRanks{owners * mesh.inner, mesh.outer};
}

// The order of sums that a communicator has which is split from that of all ranks.
SumOrder order_along(const AxisRanks& axis, int64_t host_ranks) {
  std::vector<int> hosts;
  for (int64_t rank = 0; rank < axis.size; ++rank)
    hosts.push_back(static_cast<int>(rank * axis.stride / host_ranks));
  return {.ranks = static_cast<int>(axis.size), .group = group_within(hosts)};
}

// The ranks with which one exchanges messages, on its host and on others.
struct Peers {
  int64_t near = 0;
  int64_t far = 0;
};

Peers peers_of_sums(const SumOrder& order) {
  if (order.has_two_hops()) return {order.group - 1, order.num_groups() - 1};
  return {order.group - 1, order.ranks - order.group};
}

// Its ring is there whether or not anything travels on it.
void add_communicator(NetworkForecast& network, const SumOrder& order, const Peers& peers) {
  if (order.ranks == 1) return;
  network.connections += std::min(2, order.ranks - 1) + peers.near + peers.far;
  network.nccl_bytes +=
      kRingBytes + peers.near * kNearPeerBytes + (peers.far > 0 ? kFarPeersBytes : 0);
}

// One communicator gathers, another one reduces; of a tp group both add, and those of an ep group
// send to all (Mesh).
void add_axis(NetworkForecast& network, const SumOrder& order, GridKind grid, GridAxis axis) {
  const bool is_of_layers = axis == GridAxis::kOwners;
  const Peers of_sums = peers_of_sums(order);
  const Peers all{order.group - 1, order.ranks - order.group};
  const Peers exchanged = grid == GridKind::kExpert ? all : of_sums;
  add_communicator(network, order, is_of_layers ? exchanged : Peers{});
  add_communicator(network, order, is_of_layers ? exchanged : of_sums);
}

void add_cost(NetworkForecast::Part& part, const CollectiveCost& cost) {
  part.near_bytes += cost.near_bytes;
  part.far_bytes += cost.far_bytes;
  part.ring_far_bytes += cost.ring_far_bytes;
  part.launches += cost.launches;
}

struct GridOrders {
  std::array<SumOrder, 3> along;  // by GridAxis
};

GridOrders orders_of(GridKind grid, const PlanOptions& options) {
  GridOrders orders;
  for (const GridAxis axis : kGridAxes)
    orders.along[static_cast<size_t>(axis)] =
        order_along(ranks_along(axis, grid, options), options.host_ranks);
  return orders;
}

// The elements of the rank along the inner axis that has most of them.
int64_t largest_inner_share(const Segment& segment, MeshShape mesh) {
  int64_t largest = 0;
  for (int64_t inner = 0; inner < mesh.inner; ++inner)
    largest =
        std::max(largest, segment.shares(inner * mesh.outer, (inner + 1) * mesh.outer).numel());
  return largest;
}

void add_group(NetworkForecast& network, std::array<int64_t, 3>& staging, const GroupPlan& group,
               const GridOrders& orders, const Strategy& strategy, int64_t num_gathers) {
  const GroupTypes& types = group.types;
  const bool has_wide_sums =
      types.trainable && (types.wire == DType::kFloat64 || types.main_grad == DType::kFloat64);
  int64_t amaxes = group_bytes(group).amaxes;
  for (const Segment& segment : group.layout.segments()) {
    const int64_t numel = segment.range().numel();
    const GroupBytes bytes{
        .weight = weight_bytes(types, numel),
        .wire = types.trainable ? checked_mul(numel, element_bytes(types.wire)) : 0,
        .amaxes = std::exchange(amaxes, 0)};
    const int64_t largest_share = segment.is_even() ? 0 : largest_inner_share(segment, group.mesh);
    for (const GroupMove& move : group_moves(strategy, group.mesh, bytes, num_gathers)) {
      const bool gathers = move.collective == Collective::kAllGather;
      const bool is_scattered =
          move.collective == Collective::kReduceScatter && move.axis == GridAxis::kInner;
      const MovedBuffer buffer{.bytes = move.bytes,
                               .element_bytes = gathers             ? 1
                                                : move.is_of_amaxes ? 4
                                                                    : element_bytes(types.wire),
                               .sum_bytes = has_wide_sums ? 8 : 4,
                               .largest_share = is_scattered ? largest_share : 0};
      const auto axis = static_cast<size_t>(move.axis);
      const CollectiveCost cost = cost_of(move.collective, buffer, orders.along[axis]);
      if (cost.launches == 0) continue;
      ++network.collectives;
      add_cost(gathers ? network.gathers : network.reductions, cost);
      staging[axis] = std::max(staging[axis], cost.staging_bytes);
    }
  }
}

}  // namespace

NetworkForecast forecast_network(std::span<const GroupPlan> groups, const PlanOptions& options,
                                 std::span<const int64_t> num_gathers) {
  NetworkForecast network{.hosts = ceil_div(options.ranks, options.host_ranks),
                          .sum_group = std::min(options.ranks, options.host_ranks)};
  const SumOrder of_all = order_along({1, options.ranks}, options.host_ranks);
  add_communicator(network, of_all, Peers{});
  for (const GridKind grid : kGridKinds) {
    // Without owners its parameters are dense.
    const bool is_dense = grid == GridKind::kDense;
    if (!is_dense && options.owners(grid) == 1) continue;
    const GridOrders orders = orders_of(grid, options);
    std::array<int64_t, 3> staging{};
    for (const GroupPlan& group : groups) {
      const GridKind its = row_of(group.kind).grid;
      const bool is_whole = options.owners(its) == 1;
      if (its == grid || (is_dense && is_whole))
        add_group(network, staging, group, orders, options.strategy,
                  num_gathers[static_cast<size_t>(group.unit)]);
    }
    for (const GridAxis axis : kGridAxes) {
      network.staging_bytes += staging[static_cast<size_t>(axis)];
      // Tensor-parallel parameters have the outer axis of dense ones.
      if (grid != GridKind::kTensor || axis != GridAxis::kOuter)
        add_axis(network, orders.along[static_cast<size_t>(axis)], grid, axis);
    }
  }
  return network;
}

}  // namespace fsdp
