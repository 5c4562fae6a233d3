// The answers of `fsdp plan`: forecasts as tables for people and as JSON for programs.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/rank_budget.h"

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

// With so many digits behind the point.
std::string fixed_text(double value, int digits);

}  // namespace fsdp::cli
