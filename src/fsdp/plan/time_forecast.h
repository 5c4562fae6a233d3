// The time of a step, before anything runs: what units compute by a table of measured rates, what
// travels between ranks by the speed of links, and the engine's schedule of both.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/group_plan.h"
#include "fsdp/plan/peak_forecast.h"
#include "fsdp/plan/rate_table.h"
#include "fsdp/plan/simulated_step.h"

namespace fsdp {

// Of what one rank receives over an axis, beside all others.
struct LinkSpeed {
  double bytes_per_s = 0;
  double latency_us = 0;  // of a collective
};

struct TimeOptions {
  int64_t microbatches = 1;
  bool is_recorded = false;  // the step is replayed: --cuda-graph
  // Not given: as the table has it, or the makers of its machine (published_links.h); the outer one
  // as the inner one; that of ranks of a tp or ep group as that of the axis they are on.
  std::optional<LinkSpeed> inner_link = std::nullopt;
  std::optional<LinkSpeed> outer_link = std::nullopt;
  std::optional<LinkSpeed> group_link = std::nullopt;
  double latency_us = 0;  // of collectives over published links
};

struct UsedLink {
  std::string axis;  // "inner", "outer", or "group" of tp and ep
  std::string name;
  double bytes_per_s = 0;
};

struct TimeForecast {
  SimulatedStep step;
  double tokens_per_s = 0;                // of all ranks
  double tflops_per_rank = 0;             // by the model's formula (flops_per_token)
  double matrices_us = 0;                 // of the update: Muon's matrices of the busiest owner
  std::vector<UsedLink> published_links;  // that nobody gave or measured
};

// UsageError for a model or a setting whose time is not known, and for work or links that the table
// does not have.
TimeForecast forecast_time(const ModelShape& model, std::span<const GroupPlan> groups,
                           const Forecast& forecast, const PeakOptions& batch,
                           const TimeOptions& options, const RateTable& rates);

}  // namespace fsdp
