#include "fsdp/plan/forecast.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <utility>

#include "fsdp/base/integer.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/pool_forecast.h"

namespace fsdp {

namespace {

constexpr Placement kR = Placement::kReplicate;
constexpr Placement kS = Placement::kShard;
constexpr Placement kP = Placement::kPartial;

constexpr int64_t kAmaxBytes = 4;

// The axes of each grid, by GridKind; dense and tensor-parallel parameters have the outer one in
// common.
struct GridTraffic {
  AxisTraffic Traffic::*inner;
  AxisTraffic Traffic::*outer;
};
constexpr std::array<GridTraffic, kGridKinds.size()> kGridTraffic = {
    {{&Traffic::inner, &Traffic::outer},
     {&Traffic::tensor_inner, &Traffic::outer},
     {&Traffic::expert_inner, &Traffic::expert_outer}}};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t bytes_in(int64_t numel, DType dtype) { return checked_mul(numel, element_bytes(dtype)); }

int64_t num_shared_scales(const GroupPlan& group) {
  int64_t count = 0;
  if (group.types.is_quantized())
    for (const std::vector<int64_t>& shape : group.layout.request().shapes)
      count += padded_count(shared_scales(group.types.recipe, shape[0], shape[1]));
  return count;
}

// The buffers that stay: each is what its placement leaves to the rank, in its own type.
MemoryBytes buffers_of(std::span<const GroupPlan> groups, const PlanOptions& options,
                       int64_t rank) {
  const Strategy& strategy = options.strategy;
  MemoryBytes bytes;
  for (const GroupPlan& group : groups) {
    const GroupTypes& types = group.types;
    const MeshCoordinate place = place_of(rank, group, options);
    const auto held = [&](PlacementPair placed, DType dtype) {
      return bytes_in(group.layout.shard_numel(placed, place), dtype);
    };
    bytes.weight += weight_bytes(types, group.layout.shard_numel(strategy.parameter, place));
    bytes.weight += num_shared_scales(group) * kSharedScaleBytes;
    if (!types.trainable) continue;
    bytes.main_grad += held(strategy.gradient, types.main_grad);
    const StatePlaces places =
        state_places(group.layout.shard_ranges(strategy.optimizer, place), options.offload);
    bytes.main_weight += checked_mul(numel_of(places.device), main_weight_bytes(types));
    bytes.moments += moments_bytes(types, places.device);
    for (const OwnedMatrix& matrix : matrices_in(group.layout, places.device))
      bytes.workspace =
          std::max(bytes.workspace,
                   bytes_in(newton_schulz_numel(matrix.rows, matrix.columns), *options.muon));
    bytes.host.main_weight += checked_mul(numel_of(places.host), host_weight_bytes(types));
    bytes.host.moments += moments_bytes(types, places.host);
    if (options.marks_changes) {
      bytes.moments += marks_bytes(places.device);
      bytes.host.moments += marks_bytes(places.host);
    }
  }
  return bytes;
}

// One task per matrix; it is that of all ranks that hold it.
MatrixForecast matrix_forecast(std::span<const GroupPlan> groups, const PlanOptions& options) {
  MatrixForecast result;
  if (!options.muon) return result;
  for (const GroupPlan& group : groups)
    if (group.has_matrices())
      for (int64_t tensor = 0; tensor < group.layout.num_tensors(); ++tensor)
        result.num_matrices += static_cast<int64_t>(group.layout.matrices_of(tensor).size()) *
                               options.owners(row_of(group.kind).grid);
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    double flops = 0;
    for (const GroupPlan& group : groups)
      for (const OwnedMatrix& matrix :
           matrices_in(group.layout, group.layout.shard_ranges(options.strategy.optimizer,
                                                               place_of(rank, group, options))))
        flops += static_cast<double>(newton_schulz_flops(matrix.rows, matrix.columns));
    result.mean_flops += flops / static_cast<double>(options.ranks);
    result.most_flops = std::max(result.most_flops, flops);
    if (flops == 0) ++result.num_idle_ranks;
  }
  return result;
}

// Ranks hold equally much unless tensors are never cut (but for a scale or two of the moments,
// where one rank's part begins inside a block and another's does not).
MemoryBytes buffers_of_fullest_rank(std::span<const GroupPlan> groups, const PlanOptions& options) {
  MemoryBytes fullest = buffers_of(groups, options, 0);
  const bool all_alike = std::all_of(groups.begin(), groups.end(), [](const GroupPlan& group) {
    return group.layout.has_even_shards();
  });
  if (all_alike) return fullest;
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    const MemoryBytes bytes = buffers_of(groups, options, rank);
    if (bytes.total() > fullest.total()) fullest = bytes;
  }
  return fullest;
}

struct Padding {
  double fraction = 0;
  double bound_fraction = 0;
};

// In bytes of the weights, relative to the weights.
Padding padding_of(std::span<const GroupPlan> groups) {
  double tensor_bytes = 0;
  double padded_bytes = 0;
  double bound_bytes = 0;
  for (const GroupPlan& group : groups) {
    const auto bytes = [&](int64_t numel) {
      return static_cast<double>(weight_bytes(group.types, numel));
    };
    tensor_bytes += bytes(group.layout.tensor_numel());
    padded_bytes += bytes(group.layout.padded_numel());
    bound_bytes += bytes(group.layout.lower_bound_numel());
  }
  if (tensor_bytes == 0) return {};
  return {padded_bytes / tensor_bytes - 1, bound_bytes / tensor_bytes - 1};
}

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

}  // namespace

GroupBytes group_bytes(const GroupPlan& group) {
  const int64_t padded = group.layout.padded_numel();
  return {.weight = weight_bytes(group.types, padded),
          .wire = group.types.trainable ? bytes_in(padded, group.types.wire) : 0,
          .amaxes = num_shared_scales(group) * kAmaxBytes};
}

std::vector<GroupMove> path_moves(PlacementPair from, PlacementPair to, int64_t bytes,
                                  MeshShape mesh) {
  std::vector<GroupMove> moves;
  // Equal placements and Replicate to Shard (a local view) move nothing.
  const auto add_axis = [&](GridAxis axis, Placement before, Placement after, int64_t whole) {
    if (before == kS && after == kR) moves.push_back({axis, Collective::kAllGather, whole});
    if (before == kP && after == kS) moves.push_back({axis, Collective::kReduceScatter, whole});
    if (before == kP && after == kR) moves.push_back({axis, Collective::kAllReduce, whole});
  };
  const bool inner_cut = from.inner == kS || to.inner == kS;
  add_axis(GridAxis::kInner, from.inner, to.inner, bytes);
  add_axis(GridAxis::kOuter, from.outer, to.outer, inner_cut ? ceil_div(bytes, mesh.inner) : bytes);
  return moves;
}

std::vector<GroupMove> group_moves(const Strategy& strategy, MeshShape mesh, GroupBytes bytes,
                                   int64_t num_gathers) {
  constexpr PlacementPair kWhole = {kR, kR};
  constexpr PlacementPair kUnreduced = {kP, kP};
  std::vector<GroupMove> moves;
  const auto add_path = [&](PlacementPair from, PlacementPair to, int64_t whole) {
    for (const GroupMove& move : path_moves(from, to, whole, mesh)) moves.push_back(move);
  };
  for (int64_t i = 0; i < num_gathers; ++i) add_path(strategy.parameter, kWhole, bytes.weight);
  if (bytes.wire == 0) return moves;
  add_path(kUnreduced, strategy.gradient, bytes.wire);
  add_path(strategy.gradient, strategy.optimizer, bytes.wire);
  add_path(strategy.optimizer, strategy.parameter, bytes.weight);
  const auto add_amaxes = [&](GridAxis axis, Placement placed) {
    if (placed == kS && bytes.amaxes > 0)
      moves.push_back({axis, Collective::kAllReduce, bytes.amaxes, /*is_of_amaxes=*/true});
  };
  add_amaxes(GridAxis::kInner, strategy.optimizer.inner);
  add_amaxes(GridAxis::kOuter, strategy.optimizer.outer);
  return moves;
}

Traffic traffic_of(const std::vector<GroupMove>& moves, MeshShape mesh) {
  Traffic traffic;
  for (const GroupMove& move : moves) {
    const bool is_inner = move.axis == GridAxis::kInner;
    AxisTraffic& axis = is_inner ? traffic.inner : traffic.outer;
    const int64_t bytes = received(move.bytes, is_inner ? mesh.inner : mesh.outer);
    if (move.collective == Collective::kAllGather) axis.all_gather += bytes;
    if (move.collective == Collective::kReduceScatter) axis.reduce_scatter += bytes;
    if (move.collective == Collective::kAllReduce) axis.all_reduce += 2 * bytes;
  }
  return traffic;
}

AxisTraffic Traffic::sum() const {
  AxisTraffic all = inner;
  for (const AxisTraffic* axis : {&outer, &tensor_inner, &expert_inner, &expert_outer})
    add(all, *axis);
  return all;
}

Traffic& Traffic::operator+=(const Traffic& other) {
  add(inner, other.inner);
  add(outer, other.outer);
  add(tensor_inner, other.tensor_inner);
  add(expert_inner, other.expert_inner);
  add(expert_outer, other.expert_outer);
  return *this;
}

int64_t MemoryBytes::total() const {
  return weight + main_weight + main_grad + moments + workspace + weight_pool + grad_pool;
}

Planner::Planner(ModelShape model, const PlanOptions& options)
    : model_(std::move(model)), options_(options) {
  const Clock::time_point start = Clock::now();
  options_.validate();
  model_.validate();
  groups_ = std::make_shared<const std::vector<GroupPlan>>(lay_out(model_, options_));
  const Padding padding = padding_of(*groups_);
  padding_fraction_ = padding.fraction;
  padding_bound_fraction_ = padding.bound_fraction;
  layout_seconds_ = seconds_since(start);
}

Forecast Planner::forecast(const Strategy& strategy) const {
  PlanOptions options = options_;
  options.strategy = strategy;
  return forecast_with(std::move(options));
}

Forecast Planner::forecast(const Strategy& strategy, int64_t prefetch) const {
  PlanOptions options = options_;
  options.strategy = strategy;
  options.prefetch = prefetch;
  options.pool_budget_bytes.reset();
  return forecast_with(std::move(options));
}

Forecast Planner::forecast_with(PlanOptions options) const {
  const Clock::time_point start = Clock::now();
  Forecast result;
  result.options = std::move(options);
  result.options.validate();
  result.parameters = model_.parameters();
  result.num_units = static_cast<int64_t>(model_.units.size());
  result.padding_fraction = padding_fraction_;
  result.padding_bound_fraction = padding_bound_fraction_;
  result.bytes = buffers_of_fullest_rank(*groups_, result.options);
  result.matrices = matrix_forecast(*groups_, result.options);

  const PoolForecast pool = forecast_pool(model_, *groups_, result.options);
  result.bytes.weight_pool = pool.weight_bytes;
  result.bytes.grad_pool = pool.grad_bytes;
  result.prefetch = pool.prefetch;
  for (const GroupPlan& group : *groups_) {
    const Traffic moved =
        traffic_of(group_moves(result.options.strategy, group.mesh, group_bytes(group),
                               pool.num_gathers[static_cast<size_t>(group.unit)]),
                   group.mesh);
    const GridTraffic& axes = kGridTraffic[static_cast<size_t>(row_of(group.kind).grid)];
    add(result.traffic.*axes.inner, moved.inner);
    add(result.traffic.*axes.outer, moved.outer);
  }
  if (result.options.host_ranks > 0)
    result.network = forecast_network(*groups_, result.options, pool.num_gathers);
  result.plan_seconds = layout_seconds_ + seconds_since(start);
  return result;
}

std::vector<Strategy> Planner::strategies() const {
  std::vector<Strategy> all;
  for (const Strategy& strategy : named_strategies()) {
    // Without an outer axis these rows equal the ones that only replicate over it.
    const bool needs_outer = strategy.optimizer.outer == Placement::kShard;
    if (!needs_outer || options_.outer > 1) all.push_back(strategy);
    if (options_.ranks == 1) break;
  }
  return all;
}

std::vector<Forecast> Planner::forecast_all() const {
  std::vector<Forecast> all;
  for (const Strategy& strategy : strategies()) all.push_back(forecast(strategy));
  return all;
}

}  // namespace fsdp
