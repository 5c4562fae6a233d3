// The time of a step in `fsdp plan`: its options, and the forecast as words, JSON and a picture.
#pragma once

#include <CLI/CLI.hpp>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "fsdp/plan/time_forecast.h"

namespace fsdp::cli {

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
TimeOptions time_options(const TimeArguments& given, int64_t microbatches, bool is_recorded,
                         const Rates& rates);

// How long a run is, and so how long it takes.
struct Training {
  int64_t ranks = 1;
  int64_t tokens = 0;  // in all; 0: nobody said
  int64_t tokens_per_step = 1;
};

void print_time(std::ostream& out, const TimeForecast& time, const Rates& rates,
                const Training& training);
// Every span of the step: when, in which row, of which unit.
void print_timeline(std::ostream& out, const SimulatedStep& step);
nlohmann::ordered_json to_json(const TimeForecast& time, const Rates& rates,
                               const Training& training);
// The timeline as the report of a run draws it: a page that needs no other file.
std::string picture_page(const std::string& title, const TimeForecast& time);

}  // namespace fsdp::cli
