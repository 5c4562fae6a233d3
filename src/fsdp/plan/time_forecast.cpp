#include "fsdp/plan/time_forecast.h"

#include <algorithm>
#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/state_bytes.h"
#include "fsdp/plan/flops.h"
#include "fsdp/plan/pool_forecast.h"

namespace fsdp {

namespace {

// --- links ---------------------------------------------------------------------------------------

constexpr int64_t kGpusOfHost = 8;
constexpr const char* kLinkOfHost = "nvlink";

// Makers' pages name the sum of both directions.
constexpr std::array<PublishedLink, 6> kPublishedLinks = {{{"nvlink3", 300e9, {"A100"}},
                                                           {"nvlink4", 450e9, {"H100", "H200"}},
                                                           {"nvlink5", 900e9, {"B200"}},
                                                           {"eth100", 12.5e9},
                                                           {"ib400", 50e9},
                                                           {"400g", 50e9}}};

const PublishedLink* link_of_host(const std::string& machine) {
  for (const PublishedLink& link : kPublishedLinks)
    for (const std::string_view name : link.machines)
      if (!name.empty() && machine.find(name) != std::string::npos) return &link;
  return nullptr;
}

// Sets the links that ranks need, where neither the user nor a measurement has any.
std::vector<UsedLink> add_published_links(TimeOptions& options, const PlanOptions& plan,
                                          const Rates& rates) {
  const PublishedLink* const of_host = link_of_host(rates.machine);
  if (options.inner_link || !rates.links.empty() || of_host == nullptr)
    return options.published_links;
  std::vector<UsedLink> used = options.published_links;
  const auto add = [&](const char* axis, std::optional<LinkSpeed>& speed, int64_t neighbours) {
    if (speed || neighbours == 1) return;
    const PublishedLink& link = neighbours <= kGpusOfHost ? *of_host : kPublishedLinks.back();
    speed = LinkSpeed{link.bytes_per_s, options.latency_us};
    used.push_back({axis, link});
  };
  add("inner", options.inner_link, plan.ranks / plan.outer);
  add("outer", options.outer_link, plan.outer == 1 ? 1 : plan.ranks);
  add("group", options.group_link, std::max(plan.tp, plan.ep));
  return used;
}

double us_of(const LinkSpeed& link, int64_t received) {
  return link.latency_us + 1e6 * static_cast<double>(received) / link.bytes_per_s;
}

class Links {
 public:
  Links(const Rates& rates, const TimeOptions& options)
      : rates_(rates),
        inner_(options.inner_link),
        outer_(options.outer_link ? options.outer_link : options.inner_link),
        group_(options.group_link) {}

  double us(const Traffic& moved, MeshShape mesh) const {
    return us(moved.inner, mesh.inner, inner_) + us(moved.outer, mesh.outer, outer_);
  }

  // Ranks of a tp group are neighbours of a row; those of an ep group may be of several rows.
  double us(const std::vector<Exchange>& exchanges, const PlanOptions& options) const {
    double sum = 0.0;
    for (const Exchange& exchange : exchanges) {
      const int64_t ranks = exchange.axis == ExchangeAxis::kTensor ? options.tp : options.ep;
      const std::optional<LinkSpeed>& axis =
          ranks > options.ranks / options.outer ? outer_ : inner_;
      sum += us(exchange.collective, exchange.bytes - exchange.bytes / ranks, ranks,
                group_ ? group_ : axis);
    }
    return sum;
  }

 private:
  double us(const AxisTraffic& moved, int64_t ranks, const std::optional<LinkSpeed>& link) const {
    return us("all_gather", moved.all_gather, ranks, link) +
           us("reduce_scatter", moved.reduce_scatter, ranks, link) +
           us("all_reduce", moved.all_reduce, ranks, link);
  }

  // No faster than it was measured, whatever the link could do.
  double us(const char* collective, int64_t received, int64_t ranks,
            const std::optional<LinkSpeed>& link) const {
    if (received == 0) return 0.0;
    const LinkSpeed* const measured = find_measured(collective, ranks);
    if (!link && measured == nullptr)
      throw UsageError(concat("the rates of ", rates_.machine,
                              " have no link between ranks; give the bytes per second that a rank "
                              "receives, e.g. --link 300GB"));
    return std::max(link ? us_of(*link, received) : 0.0,
                    measured != nullptr ? us_of(*measured, received) : 0.0);
  }

  // By the most ranks that were measured and are no more than these, else by the fewest.
  const LinkSpeed* find_measured(std::string_view collective, int64_t ranks) const {
    const MeasuredLink* best = nullptr;
    for (const MeasuredLink& link : rates_.links)
      if (link.collective == collective &&
          (best == nullptr || (link.ranks <= ranks ? best->ranks > ranks || link.ranks > best->ranks
                                                   : link.ranks < best->ranks)))
        best = &link;
    return best == nullptr ? nullptr : &best->speed;
  }

  const Rates& rates_;
  const std::optional<LinkSpeed> inner_;
  const std::optional<LinkSpeed> outer_;
  const std::optional<LinkSpeed> group_;
};

// --- updates -------------------------------------------------------------------------------------

// Bytes that the update of an element reads and writes. On the host no weight is split.
enum class StateMemory : uint8_t { kDevice, kHost };
int64_t bytes_of_element(const GroupTypes& types, StateMemory memory) {
  const auto both_ways = [](const std::optional<DType>& type) {
    return type ? 2 * element_bytes(*type) : 0;
  };
  const int64_t state = element_bytes(types.main_grad) + both_ways(types.first_moment) +
                        both_ways(types.second_moment);
  if (!types.main_weight) return state + 2 * element_bytes(types.weight);
  // Both halves of a split weight are its main weight; codes are made afterwards.
  const bool is_split = types.split && memory == StateMemory::kDevice;
  return state + 8 + (is_split || types.is_quantized() ? 0 : element_bytes(types.weight));
}

// Bytes per code that is made of a main weight: two passes, over matrices that are too small to be
// as fast as an update.
constexpr int64_t kCodesBytes = 14;

void add_group(UnitTimes& unit, const GroupPlan& group, const PlanOptions& options,
               const Links& links, const Rates& rates) {
  constexpr PlacementPair kWhole = {Placement::kReplicate, Placement::kReplicate};
  constexpr PlacementPair kUnreduced = {Placement::kPartial, Placement::kPartial};
  const Strategy& strategy = options.strategy;
  const int64_t padded = group.layout.padded_numel();
  const int64_t weight = weight_bytes(group.types, padded);
  const int64_t wire = padded * element_bytes(group.types.wire);
  const auto path = [&](PlacementPair from, PlacementPair to, int64_t bytes) {
    return links.us(traffic_of(path_moves(from, to, bytes, group.mesh), group.mesh), group.mesh);
  };
  unit.gather += path(strategy.parameter, kWhole, weight);
  if (!group.types.trainable) return;
  unit.refresh += path(strategy.optimizer, strategy.parameter, weight);
  unit.reduce += path(kUnreduced, strategy.gradient, wire);
  Traffic at_end =
      traffic_of(path_moves(strategy.gradient, strategy.optimizer, wire, group.mesh), group.mesh);
  unit.reduce_over_outer += links.us({.inner = {}, .outer = at_end.outer}, group.mesh);
  at_end.outer = {};
  unit.reduce_at_end += links.us(at_end, group.mesh);
  const auto held = static_cast<double>(group.layout.max_shard_numel(strategy.optimizer));
  const auto bytes = [&](StateMemory memory) {
    return held * static_cast<double>(bytes_of_element(group.types, memory));
  };
  if (!group.has_matrices())
    unit.update += 1e6 * (1 - options.offload) * bytes(StateMemory::kDevice) / rates.bytes_per_s;
  if (group.types.is_quantized()) unit.update += 1e6 * held * kCodesBytes / rates.bytes_per_s;
  if (options.offload == 0) return;
  if (rates.offload_bytes_per_s == 0)
    throw UsageError(concat("the rates of ", rates.machine,
                            " have no updates of offloaded state; measure them with fsdp plan "
                            "--calibrate and --offload, or plan without --rates"));
  unit.offload += 1e6 * options.offload * bytes(StateMemory::kHost) / rates.offload_bytes_per_s;
}

// A pass over the gradients for their norm, where no reduction at the cycle's end sums the squares.
double norm_us(std::span<const GroupPlan> groups, const PlanOptions& options, const Rates& rates) {
  double bytes = 0;
  for (const GroupPlan& group : groups)
    if (group.types.trainable && group.mesh.inner * group.mesh.outer == 1)
      bytes += static_cast<double>(group.layout.max_shard_numel(options.strategy.gradient) *
                                   element_bytes(group.types.main_grad));
  return 1e6 * bytes / rates.bytes_per_s;
}

// The busiest owner of Muon's matrices decides when a unit can be gathered. Owners take the units
// in the same order, so each unit has its share of that time.
double add_matrices(std::vector<UnitTimes>& units, std::span<const GroupPlan> groups,
                    const MatrixForecast& matrices, double flops_per_s) {
  constexpr double kIterations = 5;
  if (matrices.num_matrices == 0) return 0;
  const double us = 1e6 * kIterations * matrices.most_flops / flops_per_s;
  double all = 0;
  for (const GroupPlan& group : groups)
    if (group.has_matrices()) all += static_cast<double>(group.layout.padded_numel());
  for (const GroupPlan& group : groups)
    if (group.has_matrices())
      units[static_cast<size_t>(group.unit)].update +=
          us * static_cast<double>(group.layout.padded_numel()) / all;
  return us;
}

// The most of all matrices.
double most_of_a_rank(const MatrixForecast& matrices, int64_t ranks) {
  return matrices.num_matrices == 0
             ? 0
             : static_cast<double>(matrices.num_matrices) * matrices.most_flops /
                   (matrices.mean_flops * static_cast<double>(ranks));
}

// How many ranks share a core.
double ranks_per_core(const Rates& rates, const PlanOptions& options) {
  if (rates.device != "cpu" || rates.cores == 0) return 1.0;
  return std::max(
      1.0, static_cast<double>(options.ranks * rates.threads) / static_cast<double>(rates.cores));
}

UnitTimes unit_times(const std::string& name, const UnitCost& cost, const Links& links,
                     const PlanOptions& plan, double factor, bool recomputes) {
  // A block's host asks for about twice as much in the backward.
  UnitTimes times{.name = name,
                  .forward = factor * cost.compute.forward,
                  .backward = factor * cost.compute.backward,
                  .exchange_forward = links.us(cost.forward, plan),
                  .exchange_backward = links.us(cost.backward, plan),
                  .host_forward = cost.host_us / 3,
                  .host_backward = cost.host_us * 2 / 3};
  if (recomputes) {
    times.backward += times.forward;
    times.exchange_backward += times.exchange_forward;
    times.host_backward += times.host_forward;
  }
  return times;
}

}  // namespace

const PublishedLink* find_published_link(std::string_view name, const std::string& machine) {
  if (name == kLinkOfHost) return link_of_host(machine);
  const auto* const found =
      std::find_if(kPublishedLinks.begin(), kPublishedLinks.end(),
                   [&](const PublishedLink& link) { return link.name == name; });
  return found == kPublishedLinks.end() ? nullptr : found;
}

std::string published_link_names() {
  std::vector<std::string> names = {kLinkOfHost};
  for (const PublishedLink& link : kPublishedLinks) names.emplace_back(link.name);
  return join(names, ", ");
}

double update_bytes(std::span<const GroupPlan> groups, double offload) {
  int64_t bytes = 0;
  for (const GroupPlan& group : groups)
    if (group.types.trainable)
      bytes += group.layout.padded_numel() *
               (offload > 0 ? bytes_of_element(group.types, StateMemory::kHost)
                            : bytes_of_element(group.types, StateMemory::kDevice) +
                                  element_bytes(group.types.main_grad));
  return static_cast<double>(bytes);
}

TimeForecast forecast_time(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& batch,
                           const TimeOptions& given, const Rates& rates) {
  const PlanOptions& plan = forecast.options;
  TimeOptions options = given;
  TimeForecast result;
  result.published_links = add_published_links(options, plan, rates);
  ModelCosts costs = costs_of(model, plan, batch, rates);
  result.source = costs.source;
  result.measured = costs.measured;
  const Links links(rates, options);
  const double factor = ranks_per_core(rates, plan);
  const bool host_is_apart = rates.device != "cpu" && !options.is_recorded;

  StepTimes times{
      .units = {},
      .order = step_order_of(model),
      .prefetch = forecast.prefetch,
      .microbatches = options.microbatches,
      .between = factor * norm_us(groups, plan, rates),
      .host_update = host_is_apart
                         ? most_of_a_rank(forecast.matrices, plan.ranks) * rates.host_us_per_matrix
                         : 0.0,
      .updates_beside = rates.device == "cpu" && plan.ranks * rates.threads < rates.cores};
  for (size_t i = 0; i < model.units.size(); ++i) {
    const bool is_block = i > 0 && model.units[i].name != "lm_head";
    if (!host_is_apart) costs.units[i].host_us = 0;
    times.units.push_back(unit_times(model.units[i].name, costs.units[i], links, plan, factor,
                                     is_block && batch.recomputes_blocks));
  }
  for (const GroupPlan& group : groups)
    add_group(times.units[static_cast<size_t>(group.unit)], group, plan, links, rates);
  result.matrices_us =
      factor * add_matrices(times.units, groups, forecast.matrices, costs.muon_flops_per_s);
  for (UnitTimes& unit : times.units) unit.update *= factor;

  result.step = simulate(times);
  const double collectives = result.step.gather + result.step.reduce;
  if (rates.device != "cpu" && collectives > 0) {
    // While one runs, kernels get that much less done.
    const double most = kSlowBeside - 1;
    const double longer =
        1 + std::min(most, most / kSlowBeside * collectives / result.step.compute);
    for (UnitTimes& unit : times.units) {
      unit.forward *= longer;
      unit.backward *= longer;
    }
    result.slow_us = simulate(times).us;
  }
  const double tokens = static_cast<double>(batch.batch.tokens() * options.microbatches);
  const double seconds = result.step.us * 1e-6;
  // Ranks of a tp group have the same tokens.
  result.tokens_per_s = tokens * static_cast<double>(plan.ranks / plan.tp) / seconds;
  result.tflops_per_rank = flops_per_token(*model.layers, batch.batch.sequence) * tokens /
                           static_cast<double>(plan.tp) / seconds * 1e-12;
  return result;
}

}  // namespace fsdp
