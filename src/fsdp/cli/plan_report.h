// Forecasts as tables for people and as JSON for programs.
#pragma once

#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <span>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/peak_forecast.h"

namespace fsdp::cli {

nlohmann::ordered_json to_json(const ModelShape& model, const Forecast& forecast);

// One strategy: a row per kind of memory and per collective, with type and share.
void print_forecast(std::ostream& out, const ModelShape& model, const Forecast& forecast);

// The same for a step's peak of memory.
nlohmann::ordered_json to_json(const PeakForecast& peak);
void print_peak(std::ostream& out, const BatchShape& batch, const PeakForecast& peak);

// Several strategies on one model and mesh: a row each.
void print_comparison(std::ostream& out, const ModelShape& model,
                      std::span<const Forecast> forecasts);

}  // namespace fsdp::cli
