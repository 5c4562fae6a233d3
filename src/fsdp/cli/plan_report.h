// The answers of `fsdp plan`: forecasts as tables for people and as JSON for programs, and the
// options of a step's time with its words, JSON and picture.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/rank_budget.h"
#include "fsdp/plan/time_forecast.h"

namespace fsdp::cli {

nlohmann::ordered_json to_json(const ModelShape& model, const Forecast& forecast);

// One strategy: a row per kind of memory and per collective, with type and share; and a step's peak
// of memory, if a batch is known.
nlohmann::ordered_json to_json(const ModelShape& model, const RankPlan& plan);
void print_plan(std::ostream& out, const ModelShape& model, const RankPlan& plan);

// Several strategies on one model and mesh: a row each.
void print_comparison(std::ostream& out, const ModelShape& model,
                      std::span<const Forecast> forecasts);

// Plans that fit into so many bytes: a row each.
void print_fits(std::ostream& out, const ModelShape& model, int64_t budget_bytes,
                std::span<const RankPlan> plans);

// --- the time of a step --------------------------------------------------------------------------

// The options as typed; empty for one that was not given.
struct TimeArguments {
  std::string rates;
  std::string link;
  std::string outer_link;
  std::string group_link;
  std::string link_latency;
  std::string picture;
  bool timeline = false;
};

void add_time_options(CLI::App& app, TimeArguments& given);

// nullopt: no time is asked for. UsageError for options that need --rates.
std::optional<Rates> rates_of(const CLI::App& app, const TimeArguments& given);

// Links as given, or as the table has them.
TimeOptions time_options(const TimeArguments& given, int64_t microbatches, bool is_recorded);

void print_time(std::ostream& out, const TimeForecast& time, const Rates& rates);
// Every span of the step: when, in which row, of which unit.
void print_timeline(std::ostream& out, const SimulatedStep& step);
nlohmann::ordered_json to_json(const TimeForecast& time, const Rates& rates);
// The timeline as the report of a run draws it: a page that needs no other file.
std::string picture_page(const std::string& title, const TimeForecast& time);

}  // namespace fsdp::cli
