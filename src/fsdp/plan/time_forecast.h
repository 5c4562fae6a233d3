// The time of a step, before anything runs: what units compute by a machine's rates, what travels
// between ranks by the speed of links, and the engine's schedule of both.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/peak_forecast.h"
#include "fsdp/plan/rates.h"
#include "fsdp/plan/simulated_step.h"
#include "fsdp/plan/unit_costs.h"

namespace fsdp {

// A link between GPUs whose speed its maker publishes, in one direction; collectives get less.
struct PublishedLink {
  std::string_view name;                          // "nvlink4"
  double bytes_per_s;                             // that a rank receives
  std::array<std::string_view, 2> machines = {};  // that have it between the GPUs of a host
};

// "nvlink" is the one between the GPUs of a host of this machine. nullptr: no link is called so.
const PublishedLink* find_published_link(std::string_view name, const std::string& machine);

// "nvlink, nvlink3, nvlink4, ..."
std::string published_link_names();

struct UsedLink {
  std::string axis;  // "inner", "outer", or "group" of tp and ep
  PublishedLink link;
};

struct TimeOptions {
  int64_t microbatches = 1;
  bool is_recorded = false;  // the step is replayed: --cuda-graph
  // Not given: as measured, else as published, which is NVLink between up to 8 neighbours and a
  // card of 400 Gb/s beyond; the outer one as the inner one; that of ranks of a tp or ep group as
  // that of the axis they are on.
  std::optional<LinkSpeed> inner_link = std::nullopt;
  std::optional<LinkSpeed> outer_link = std::nullopt;
  std::optional<LinkSpeed> group_link = std::nullopt;
  double latency_us = 0;                       // of collectives over published links
  std::vector<UsedLink> published_links = {};  // those of the above that were given by name
};

// A product of 132 blocks beside an all-gather of 24 blocks needs a second wave of an H100's 132
// multiprocessors: utilisation of 47 in place of 80 % (docs/plan.md, "How far it is off").
inline constexpr double kSlowBeside = 1.7;

struct TimeForecast {
  SimulatedStep step;
  double tokens_per_s = 0;     // of all ranks
  double tflops_per_rank = 0;  // by the model's formula (flops_per_token)
  double matrices_us = 0;      // of the update: Muon's matrices of the busiest owner
  CostSource source = CostSource::kRoofline;
  BatchShape measured = {};               // the batch of the parts that were measured
  std::vector<UsedLink> published_links;  // by data sheet: given by name, or by nobody
  // A step in which kernels beside collectives take kSlowBeside times as long; 0: it has none.
  double slow_us = 0;
};

// UsageError for a model whose layers are not known, and for products or links that the rates do
// not have.
TimeForecast forecast_time(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& batch,
                           const TimeOptions& options, const Rates& rates);

// Bytes that the update of one rank alone reads and writes, with a pass for the norm; by time, they
// are a machine's Rates::bytes_per_s. With all state offloaded, those of the host's updates.
double update_bytes(std::span<const GroupPlan> groups, double offload);

}  // namespace fsdp
