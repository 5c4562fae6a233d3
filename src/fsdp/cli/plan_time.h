// The time of a step in `fsdp plan`: its options, and the forecast as words, JSON and a picture.
#pragma once

#include <CLI/CLI.hpp>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "fsdp/plan/rate_table.h"
#include "fsdp/plan/time_forecast.h"

namespace fsdp::cli {

// As typed; empty for an option that was not given.
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
std::optional<RateTable> rates_of(const CLI::App& app, const TimeArguments& given);

// Links as given, or as the table has them.
TimeOptions time_options(const TimeArguments& given, int64_t microbatches, bool is_recorded);

void print_time(std::ostream& out, const TimeForecast& time, const RateTable& rates);
// Every span of the step: when, in which row, of which unit.
void print_timeline(std::ostream& out, const SimulatedStep& step);
nlohmann::ordered_json to_json(const TimeForecast& time, const RateTable& rates);
// The timeline as the report of a run draws it: a page that needs no other file.
std::string picture_page(const std::string& title, const TimeForecast& time);

}  // namespace fsdp::cli
