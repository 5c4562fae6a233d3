#include "fsdp/plan/time_forecast.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <variant>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/layout/quantized_bytes.h"
#include "fsdp/nn/config/flops.h"
#include "fsdp/plan/path_traffic.h"
#include "fsdp/plan/published_links.h"
#include "fsdp/plan/step_work.h"
#include "fsdp/plan/update_work.h"

namespace fsdp {

namespace {

// --- links ---------------------------------------------------------------------------------------

struct Links {
  const RateTable& rates;
  std::optional<LinkSpeed> inner;
  std::optional<LinkSpeed> outer;
  std::optional<LinkSpeed> group;

  // One collective over one axis; `received` of it by this rank.
  double us(const char* work, int64_t received, double whole_of_received, int64_t num_ranks,
            const std::optional<LinkSpeed>& link) const {
    if (received == 0) return 0.0;
    const RateGrid* measured = rates.find(work);
    const auto whole = static_cast<int64_t>(static_cast<double>(received) * whole_of_received);
    const double here = measured == nullptr ? 0.0 : measured->us_at(std::array{num_ranks, whole});
    if (link)
      return std::max(here,
                      link->latency_us + 1e6 * static_cast<double>(received) / link->bytes_per_s);
    if (measured == nullptr)
      throw UsageError(concat("the rates of ", rates.machine,
                              " have no link between ranks; give the bytes per second that a rank "
                              "receives, e.g. --link 300GB"));
    return here;
  }

  double us(const AxisTraffic& moved, int64_t num_ranks,
            const std::optional<LinkSpeed>& link) const {
    if (num_ranks == 1) return 0.0;
    const double share = static_cast<double>(num_ranks) / static_cast<double>(num_ranks - 1);
    return us("all_gather", moved.all_gather, share, num_ranks, link) +
           us("reduce_scatter", moved.reduce_scatter, share, num_ranks, link) +
           us("all_reduce", moved.all_reduce, share / 2, num_ranks, link);
  }

  // Ranks of a tp group are neighbours of a row; those of an ep group may be of several rows.
  double us(const std::vector<Exchange>& exchanges, const PlanOptions& options) const {
    double sum = 0.0;
    for (const Exchange& exchange : exchanges) {
      const bool is_tensor = exchange.axis == ExchangeAxis::kTensor;
      const int64_t ranks = is_tensor ? options.tp : options.ep;
      const std::optional<LinkSpeed>& axis =
          ranks > options.ranks / options.outer && outer ? outer : inner;
      const double whole = static_cast<double>(ranks) / static_cast<double>(ranks - 1);
      sum += us(exchange.collective, std::llround(static_cast<double>(exchange.bytes) / whole),
                whole, ranks, group ? group : axis);
    }
    return sum;
  }

  double us(const Traffic& moved, MeshShape mesh) const {
    return us(moved.inner, mesh.inner, inner) + us(moved.outer, mesh.outer, outer ? outer : inner);
  }
};

// --- units ---------------------------------------------------------------------------------------

void add_group(UnitTimes& unit, const GroupPlan& group, const PlanOptions& options,
               const Links& links) {
  constexpr PlacementPair kWhole = {Placement::kReplicate, Placement::kReplicate};
  constexpr PlacementPair kUnreduced = {Placement::kPartial, Placement::kPartial};
  const Strategy& strategy = options.strategy;
  const int64_t padded = group.layout.padded_numel();
  const int64_t weight = weight_bytes(group.types, padded);
  const int64_t wire = padded * element_bytes(group.types.wire);
  const auto path = [&](PlacementPair from, PlacementPair to, int64_t bytes) {
    return links.us(path_traffic(from, to, bytes, group.mesh), group.mesh);
  };
  unit.gather += path(strategy.parameter, kWhole, weight);
  if (!group.types.trainable) return;
  unit.refresh += path(strategy.optimizer, strategy.parameter, weight);
  unit.reduce += path(kUnreduced, strategy.gradient, wire);
  Traffic at_end = path_traffic(strategy.gradient, strategy.optimizer, wire, group.mesh);
  unit.reduce_over_outer += links.us({.inner = {}, .outer = at_end.outer}, group.mesh);
  at_end.outer = {};
  unit.reduce_at_end += links.us(at_end, group.mesh);
  const auto held = static_cast<double>(group.layout.max_shard_numel(strategy.optimizer));
  const auto on_host = static_cast<int64_t>(std::llround(held * options.offload));
  const int64_t on_device = static_cast<int64_t>(held) - on_host;
  if (!group.has_matrices()) unit.update += update_us(group.types, on_device, links.rates);
  unit.update += codes_us(group, static_cast<int64_t>(held), links.rates);
  unit.offload += offloaded_update_us(group.types, on_host, links.rates);
}

// What the host takes to ask for a step that is not recorded.
struct HostTimes {
  double block = 0.0;     // forward and backward
  double matrices = 0.0;  // of Muon's update, beside that of AdamW
};

HostTimes host_times(const RateTable& rates, const TimeOptions& options, const ModelShape& model,
                     double most_matrices) {
  const auto num_blocks = static_cast<int64_t>(model.units.size()) - 2;
  const bool is_apart = rates.device != "cpu" && !options.is_recorded && num_blocks > 0;
  if (!is_apart) return {};
  const auto us = [&](const char* work) { return rates.us(work, std::array{num_blocks}); };
  const bool has_experts = std::holds_alternative<MixtralConfig>(*model.layers);
  HostTimes times{.block = us(has_experts ? "host step experts" : "host step") /
                           static_cast<double>(num_blocks)};
  if (most_matrices > 0.0)
    times.matrices = most_matrices * std::max(0.0, us("host step muon") - us("host step"));
  return times;
}

// How many ranks share a core.
double ranks_per_core(const RateTable& rates, const PlanOptions& options) {
  if (rates.device != "cpu" || rates.cores == 0) return 1.0;
  return std::max(
      1.0, static_cast<double>(options.ranks * rates.threads) / static_cast<double>(rates.cores));
}

ModelWork known_work(const ModelShape& model, const PlanOptions& options, const PeakOptions& batch,
                     const RateTable& rates) {
  const std::optional<ModelWork> work =
      model.layers ? work_of(*model.layers, {.compute = options.compute,
                                             .weights = options.weights,
                                             .rows = batch.batch.rows,
                                             .sequence = batch.batch.sequence,
                                             .tp = options.tp,
                                             .ep = options.ep,
                                             .expert_capacity = batch.expert_capacity,
                                             .logit_bytes = batch.logit_bytes,
                                             .on_cpu = rates.device == "cpu"})
                   : std::nullopt;
  if (!work)
    throw UsageError(concat("the time of model '", model.name,
                            "' is not known; it is for the Llama family and Mixtral's experts, "
                            "without quantised experts, multi-token prediction, and windows "
                            "(sliding_window) shorter than a sequence; plan without --rates"));
  return *work;
}

}  // namespace

TimeForecast forecast_time(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& batch,
                           const TimeOptions& given, const RateTable& rates) {
  const PlanOptions& plan = forecast.options;
  TimeOptions options = given;
  const std::vector<UsedLink> published = add_published_links(options, plan, rates);
  const ModelWork work = known_work(model, plan, batch, rates);
  const Links links{rates, options.inner_link, options.outer_link, options.group_link};
  const double factor = ranks_per_core(rates, plan);
  const MatrixTimes matrices = matrix_times(groups, plan, model.units.size(), rates);
  const HostTimes host = host_times(rates, options, model, matrices.most_of_a_rank);

  StepTimes times{
      .units = {},
      .order = mirrored_order(std::vector<int32_t>(model.uses.begin(), model.uses.end()),
                              std::vector<int32_t>(model.ends.begin(), model.ends.end())),
      .prefetch = forecast.prefetch,
      .microbatches = options.microbatches,
      .host_update = host.matrices,
      .updates_beside = rates.device == "cpu" && plan.ranks * rates.threads < rates.cores};
  for (size_t i = 0; i < model.units.size(); ++i) {
    const bool is_block = i > 0 && i + 1 < model.units.size();
    const UnitWork& unit = i == 0 ? work.embedding : is_block ? work.block : work.head;
    UnitTimes each{.name = model.units[i].name,
                   .forward = factor * us_of(unit.forward.items, rates),
                   .backward = factor * us_of(unit.backward.items, rates),
                   .exchange_forward = links.us(unit.forward.exchanges, plan),
                   .exchange_backward = links.us(unit.backward.exchanges, plan)};
    // A block's host asks for about twice as much in the backward.
    if (is_block) {
      each.host_forward = host.block / 3;
      each.host_backward = host.block - each.host_forward;
    }
    if (is_block && batch.recomputes_blocks) {
      each.backward += each.forward;
      each.exchange_backward += each.exchange_forward;
      each.host_backward += each.host_forward;
    }
    times.units.push_back(std::move(each));
  }
  for (const GroupPlan& group : groups) {
    UnitTimes& unit = times.units[static_cast<size_t>(group.unit)];
    add_group(unit, group, plan, links);
    // Where a reduction ends the cycle it has summed the squares; else a pass does.
    const bool is_reduced = group.mesh.inner * group.mesh.outer > 1;
    if (group.types.trainable && !is_reduced)
      times.between +=
          factor *
          rates.us("squared sum", std::array{group.layout.max_shard_numel(plan.strategy.gradient)});
  }
  double matrices_us = 0.0;
  for (size_t i = 0; i < times.units.size(); ++i) {
    double& update = times.units[i].update;
    update = factor * (update + matrices.units[i]);
    matrices_us += factor * matrices.units[i];
  }

  TimeForecast result{
      .step = simulate(times), .matrices_us = matrices_us, .published_links = published};
  const double tokens = static_cast<double>(batch.batch.tokens() * options.microbatches);
  const double seconds = result.step.us * 1e-6;
  // Ranks of a tp group have the same tokens.
  result.tokens_per_s = tokens * static_cast<double>(plan.ranks / plan.tp) / seconds;
  result.tflops_per_rank = flops_per_token(*model.layers, batch.batch.sequence) * tokens /
                           static_cast<double>(plan.tp) / seconds * 1e-12;
  return result;
}

}  // namespace fsdp
