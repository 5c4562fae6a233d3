// `fsdp plan`: memory and traffic of a model on any number of ranks, without a run.
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/plan_report.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/peak_forecast.h"

namespace fsdp::cli {

namespace {

// As typed; empty for an option that was not given.
struct PlanArguments {
  std::string model;
  std::string ranks;
  std::string outer = "1";
  std::string ep = "1";
  std::string tp = "1";
  std::vector<std::string> expert_parameters;
  std::string strategy = "optim_grads_params";
  std::string main_params = "fp32";
  std::string main_grads = "none";
  std::string grad_comm = "none";
  std::string main_storage{name_of(PrecisionTypes{}.main_storage)};
  std::string weights{row_of(WeightRecipe::kPlain).name};
  std::vector<std::string> weights_except;
  std::string weights_scaling{name_of(WeightScaling::kCurrent)};
  std::string moments = "fp32";
  std::string first_moment;
  std::string second_moment;
  std::string offload = "0";
  std::string pool = "planned";
  std::string prefetch = "1";
  std::string budget;
  std::string granularity = "element";
  std::string batch;
  std::string sequence;
  std::string gradient_lifetime = "persistent";
  std::string logit_memory = concat(kDefaultLogitBytes >> 20, "MiB");
  bool json = false;
  bool compare = false;
};

PoolKind parse_pool(const std::string& value) {
  std::vector<std::string> names;
  for (const PoolKind kind : all_pool_kinds()) names.emplace_back(name_of(kind));
  return all_pool_kinds()[parse_choice("--pool", value, names)];
}

MainStorage parse_main_storage(const std::string& value) {
  std::vector<std::string> names;
  for (const MainStorage storage : all_main_storages()) names.emplace_back(name_of(storage));
  return all_main_storages()[parse_choice("--main-storage", value, names)];
}

WeightRecipe parse_weights(const std::string& value) {
  std::vector<std::string> names;
  for (const WeightRecipeRow& row : all_weight_recipes()) names.emplace_back(row.name);
  return all_weight_recipes()[parse_choice("--weights", value, names)].recipe;
}

WeightScaling parse_weight_scaling(const std::string& value) {
  std::vector<std::string> names;
  for (const WeightScaling scaling : all_weight_scalings()) names.emplace_back(name_of(scaling));
  return all_weight_scalings()[parse_choice("--weights-scaling", value, names)];
}

// The moment's own option, or else the one for both.
std::optional<DType> parse_moment(const char* option, const std::string& value,
                                  const std::string& both) {
  return value.empty() ? parse_dtype_or_none("--moments", both)
                       : parse_dtype_or_none(option, value);
}

Granularity parse_granularity_option(const std::string& value) {
  constexpr const char* kOption = "--granularity";
  constexpr std::string_view kBlock = "block:";
  if (value.starts_with(kBlock))
    return Granularity::block(
        parse_whole_number(kOption, value.substr(kBlock.size()), 1, int64_t{1} << 40));
  const std::vector<std::string> names = {"element", "row", "tensor", "block:N"};
  switch (parse_choice(kOption, value, names)) {
    case 0:
      return Granularity::element();
    case 1:
      return Granularity::row();
    case 2:
      return Granularity::tensor();
  }
  refuse_option(kOption, value, "N is the number of elements of a block, e.g. block:128");
}

PlanOptions plan_options_of(const PlanArguments& given) {
  PlanOptions options;
  options.ranks = parse_whole_number("--ranks", given.ranks, 1, kMaxRanks);
  options.outer = parse_whole_number("--outer", given.outer, 1, kMaxRanks);
  options.ep = parse_whole_number("--ep", given.ep, 1, kMaxRanks);
  options.tp = parse_whole_number("--tp", given.tp, 1, kMaxRanks);
  options.strategy = parse_strategy(given.strategy);
  options.precision.main_params = parse_dtype_or_none("--main-params", given.main_params);
  options.precision.main_grads = parse_dtype_or_none("--main-grads", given.main_grads);
  options.precision.grad_comm = parse_dtype_or_none("--grad-comm", given.grad_comm);
  options.precision.main_storage = parse_main_storage(given.main_storage);
  options.precision.first_moment =
      parse_moment("--first-moment", given.first_moment, given.moments);
  options.precision.second_moment =
      parse_moment("--second-moment", given.second_moment, given.moments);
  options.weights = parse_weights(given.weights);
  options.weights_except = given.weights_except;
  options.weight_scaling = parse_weight_scaling(given.weights_scaling);
  options.offload = parse_fraction("--offload", given.offload);
  options.pool = parse_pool(given.pool);
  options.prefetch = parse_whole_number("--prefetch", given.prefetch, 0, kMaxPrefetch);
  if (!given.budget.empty()) options.budget_bytes = parse_bytes("--budget", given.budget);
  options.granularity = parse_granularity_option(given.granularity);
  return options;
}

// The batch to forecast the peak for, if one is given.
std::optional<PeakOptions> read_peak_options(const CLI::App& app, const PlanArguments& given) {
  if (given.batch.empty() && given.sequence.empty()) {
    for (const auto& [option, value] : {std::pair{"--gradient-lifetime", given.gradient_lifetime},
                                        std::pair{"--logit-memory", given.logit_memory}})
      if (app.count(option) > 0)
        throw UsageError(concat(option, " is '", value,
                                "', which matters for the peak of a step alone; give --batch and "
                                "--sequence, too"));
    return std::nullopt;
  }
  if (given.batch.empty() || given.sequence.empty())
    throw UsageError(concat(given.batch.empty() ? "--batch" : "--sequence",
                            " is missing; the peak of a step needs both: sequences and their "
                            "tokens, e.g. --batch 4 --sequence 2048"));
  if (given.compare)
    throw UsageError(concat("--batch is '", given.batch,
                            "', but --compare has no column for peaks; drop one of the two"));
  constexpr int64_t kMost = int64_t{1} << 24;
  PeakOptions options;
  options.batch = {.rows = parse_whole_number("--batch", given.batch, 1, kMost),
                   .sequence = parse_whole_number("--sequence", given.sequence, 1, kMost)};
  const std::vector<std::string> lifetimes = {"persistent", "step"};
  const size_t lifetime = parse_choice("--gradient-lifetime", given.gradient_lifetime, lifetimes);
  options.gradient_lifetime =
      lifetime == 0 ? GradientLifetime::kPersistent : GradientLifetime::kStep;
  options.logit_bytes = parse_bytes("--logit-memory", given.logit_memory);
  return options;
}

void run_plan(const CLI::App& app, const PlanArguments& given) {
  if (given.model.empty())
    throw UsageError(
        concat("--model is missing; give a JSON file or one of ", join(model_names(), ", ")));
  if (given.ranks.empty())
    throw UsageError("--ranks is missing; give the number of ranks, e.g. --ranks 8");
  if (given.compare && app.count("--strategy") > 0)
    throw UsageError(concat("--strategy is '", given.strategy,
                            "', but --compare shows every strategy; drop one of the two"));
  if (!given.budget.empty() && app.count("--prefetch") > 0)
    throw UsageError(concat("--prefetch is '", given.prefetch,
                            "', but --budget chooses the depth itself; drop one of the two"));
  const PlanOptions options = plan_options_of(given);
  const std::optional<PeakOptions> batch = read_peak_options(app, given);
  const auto start = std::chrono::steady_clock::now();
  ModelShape loaded = load_model(given.model);
  declare_experts(loaded, given.expert_parameters);
  const std::chrono::duration<double> load = std::chrono::steady_clock::now() - start;
  const Planner planner(std::move(loaded), options);
  const ModelShape& model = planner.model();
  if (!given.compare) {
    Forecast forecast = planner.forecast();
    forecast.plan_seconds += load.count();
    std::optional<PeakForecast> peak;
    if (batch) peak = forecast_peak(model, planner.groups(), forecast, *batch);
    if (given.json) {
      nlohmann::ordered_json value = to_json(model, forecast);
      if (peak) value["peak_bytes"] = to_json(*peak);
      print_json(value);
    } else {
      print_forecast(std::cout, model, forecast);
      if (peak) print_peak(std::cout, batch->batch, *peak);
    }
    return;
  }
  std::vector<Forecast> forecasts = planner.forecast_all();
  for (Forecast& forecast : forecasts) forecast.plan_seconds += load.count();
  if (!given.json) return print_comparison(std::cout, model, forecasts);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Forecast& forecast : forecasts) rows.push_back(to_json(model, forecast));
  print_json(rows);
}

std::string footer() {
  return concat("DTYPE is fp64, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2 or none. Known models: ",
                join(model_names(), ", "),
                ".\nExamples:\n"
                "  fsdp plan --model llama3-8b --ranks 8\n"
                "  fsdp plan --model deepseek-v3 --ranks 4096 --outer 8 --compare\n"
                "  fsdp plan --model config.json --ranks 64 --grad-comm bf16 --main-grads fp32 "
                "--budget 4GiB --json\n"
                "  fsdp plan --model llama-1b --ranks 1 --main-grads fp32 --batch 4 --sequence "
                "2048\n"
                "docs/plan.md has every formula.");
}

}  // namespace

Command add_plan(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "plan", "Forecast memory and traffic of a model on any number of ranks");
  app->footer(footer());
  const auto given = std::make_shared<PlanArguments>();
  const auto option = [&](const char* name, std::string& value, const char* type,
                          const char* text) {
    app->add_option(name, value, text)->type_name(type)->capture_default_str();
  };
  option("--model", given->model, "NAME|FILE.json",
         "A known model, a published config.json, or a list of units (docs/plan.md)");
  option("--ranks", given->ranks, "N", "Ranks in all");
  option("--outer", given->outer, "M",
         "Ranks along the outer axis (HSDP, HFSDP); divides --ranks, the rest is the shard axis");
  option("--ep", given->ep, "N",
         "Ranks that share out the experts of a layer: each has its own, and tokens travel");
  option("--tp", given->tp, "N",
         "Ranks that compute one batch together: each has slices of the matrices");
  app->add_option("--expert-parameters", given->expert_parameters,
                  "Tensors of a list of your own with one slice per expert along their first "
                  "dimension, for --ep: '*.experts.*'; may be given several times")
      ->type_name("GLOB")
      ->allow_extra_args(false);
  option("--strategy", given->strategy, "NAME",
         "What is sharded: no_shard, optim, optim_grads, optim_grads_params, the last three also "
         "with +hfsdp, or placements such as RS/PS/SS");
  option("--main-params", given->main_params, "DTYPE",
         "Main weights; none: the optimizer updates the weights themselves");
  option("--main-storage", given->main_storage, "HOW",
         "fp32 main weights of bf16 weights: separate (4 bytes each) or split (the weights are "
         "their upper halves, 2 bytes each hold the rest)");
  option("--main-grads", given->main_grads, "DTYPE", "Main gradients; none: as the parameter");
  option("--grad-comm", given->grad_comm, "DTYPE",
         "What gradients travel in; none: as the main gradients");
  option("--weights", given->weights, "RECIPE",
         "How matrices of linear layers and experts are gathered: bf16 (as they compute), fp8-row, "
         "fp8-tensor, fp8-block, mxfp8 or nvfp4");
  app->add_option("--weights-except", given->weights_except,
                  "Parameters that stay as they compute, by name: 'model.layers.0.*'; may be given "
                  "several times")
      ->type_name("GLOB")
      ->allow_extra_args(false);
  option("--weights-scaling", given->weights_scaling, "HOW",
         "Where shared scales of --weights come from: current, or delayed, which keeps a history");
  option("--moments", given->moments, "DTYPE", "Both of the optimizer's moments");
  option("--first-moment", given->first_moment, "DTYPE",
         "Running average of gradients (SGD: the momentum), where it differs from --moments");
  option("--second-moment", given->second_moment, "DTYPE",
         "Running average of their squares (SGD: none), where it differs from --moments");
  option("--offload", given->offload, "FRACTION",
         "How much of the optimizer's state (moments and main weights) is in the host's memory");
  option("--pool", given->pool, "KIND",
         "Memory of gathered weights and unreduced gradients: on_demand, double_buffer, max_pool "
         "or planned");
  option("--prefetch", given->prefetch, "K", "Units gathered ahead of the one that computes");
  option("--budget", given->budget, "BYTES",
         "Planned pool: take the deepest prefetch that fits, e.g. 4GiB");
  option("--granularity", given->granularity, "WHERE",
         "Where a shard may end: element, row, block:N or tensor");
  option("--batch", given->batch, "N",
         "Sequences that a rank computes at a time, for the most memory of a step on a GPU");
  option("--sequence", given->sequence, "N", "Tokens of each of them");
  option("--gradient-lifetime", given->gradient_lifetime, "HOW",
         "For that: whether main gradients keep their memory between steps (persistent) or not "
         "(step)");
  option("--logit-memory", given->logit_memory, "BYTES",
         "For that: logits of so many tokens at once as fit into this");
  app->add_flag("--json", given->json, "Print JSON instead of a table");
  app->add_flag("--compare", given->compare, "All strategies side by side");
  return {app, [app, given] { run_plan(*app, *given); }};
}

}  // namespace fsdp::cli
