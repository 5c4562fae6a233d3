// `fsdp plan`: memory, traffic and time of a model on any number of ranks, without a run.
#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/cli/calibrate.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/plan_report.h"
#include "fsdp/cli/plan_time.h"
#include "fsdp/cli/setting_flags.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_adapters.h"
#include "fsdp/plan/peak_forecast.h"
#include "fsdp/plan/rank_budget.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::cli {

namespace {

// The options as typed; empty for one that was not given.
struct PlanArguments {
  std::string model;
  std::string ranks;
  std::string host_ranks;
  std::vector<std::string> expert_parameters;
  std::string budget;
  std::string fit;
  bool largest_batch = false;
  bool json = false;
  bool compare = false;
  CalibrateArguments calibrate;
  TimeArguments time;
  SettingFlags settings;
};

// The settings of a run that decide what it takes, but for those that mean something else here.
constexpr std::string_view kPlannedSettings[] = {
    "optimizer",       "compute",  "recompute",    "expert-capacity",
    "weights",         "sequence", "logit-memory", "weights-except",
    "batch",           "tokens",   "microbatches", "gradient-lifetime",
    "outer",           "ep",       "cuda-graph",   "main-storage",
    "expert-exchange", "tp",       "strategy",     "main-params",
    "granularity",     "moments",  "pool",         "main-grads",
    "pool-budget",     "offload",  "patches",      "grad-comm",
    "other-units",     "prefetch", "lora",         "lora-alpha",
    "lora-on"};
// The ones that only a step's peak depends on.
constexpr std::array kPeakOptions = {"--recompute", "--logit-memory", "--gradient-lifetime",
                                     "--microbatches"};
// Those that only its time depends on.
constexpr std::array kRatesOptions = {"--tokens", "--cuda-graph"};

// More ranks than --fit tries by itself.
constexpr int64_t kMostRanksToFit = int64_t{1} << 16;
// Numbers of ranks that --fit answers with.
constexpr int64_t kFitAnswers = 3;

struct PlanQuestion {
  train::TrainOptions run;
  std::string model;
  std::optional<int64_t> ranks;
  bool has_batch = false;
  int64_t host_ranks = 0;
  bool is_of_gpu = true;  // the most memory of a step
  std::optional<int64_t> budget;
  std::optional<int64_t> fit;
  std::optional<Rates> rates;

  bool is_on_cpu() const { return rates && rates->device == "cpu"; }

  PlanOptions options(int64_t num_ranks) const {
    PlanOptions options = train::plan_options(
        run, num_ranks, run.compute.value_or(is_on_cpu() ? DType::kFloat32 : DType::kBFloat16));
    options.host_ranks = host_ranks;
    return options;
  }

  // The batch that a rank computes at a time; nullopt: nobody said.
  std::optional<PeakOptions> computed(int64_t num_ranks) const {
    if (!has_batch) return std::nullopt;
    PeakOptions batch = train::peak_options(run, num_ranks);
    // Ranks that have met choose so, too: between hosts, chosen rows travel alone.
    const bool is_between_hosts = host_ranks > 0 && host_ranks % run.ep != 0;
    if (run.build.expert_exchange == ExpertExchange::kAuto && is_between_hosts)
      batch.pads_experts = false;
    return batch;
  }

  // The batch where its memory on a GPU is asked for.
  std::optional<PeakOptions> batch(int64_t num_ranks, const ModelShape& shape) const {
    // A file speaks of a run, not of a GPU's memory; so what is not known is left out.
    const bool is_open =
        !is_of_gpu && !knows_activations(shape, options(num_ranks).compute, run.sequence_length());
    return is_open || is_on_cpu() ? std::nullopt : computed(num_ranks);
  }
};

// "--batch is '4'"
std::string as_typed(const CLI::App& app, const std::string& option) {
  return concat(option, " is '", app.get_option(option)->results().front(), "'");
}

void refuse_both(const CLI::App& app, const char* option, const char* other, const char* why) {
  if (app.count(option) > 0 && app.count(other) > 0)
    throw UsageError(
        concat(as_typed(app, option), ", but ", other, " ", why, "; drop one of the two"));
}

[[noreturn]] void refuse_half(const char* missing) {
  throw UsageError(concat(missing,
                          " is missing; the peak of a step needs both: sequences and their tokens, "
                          "e.g. --batch 4 --sequence 2048"));
}

// A run with loaded weights takes as many as its data have; here nobody opens them.
void check_sequence(const CLI::App& app, const train::TrainOptions& run) {
  if (run.sequence || (app.count("--sequence") == 0 && train::init_of(run).empty())) return;
  throw UsageError(
      "--sequence is 'auto', which only a run with its data can answer; give the tokens of a "
      "sequence, e.g. --sequence 2048");
}

void check_together(const CLI::App& app, const PlanArguments& given) {
  refuse_both(app, "--strategy", "--compare", "shows every strategy");
  refuse_both(app, "--strategy", "--fit", "tries every strategy");
  refuse_both(app, "--prefetch", "--budget", "chooses the depth itself");
  refuse_both(app, "--prefetch", "--pool-budget", "chooses the depth itself");
  refuse_both(app, "--pool-budget", "--budget", "leaves the pool what the rest does not need");
  refuse_both(app, "--budget", "--fit", "is the memory of a rank, too");
  refuse_both(app, "--budget", "--compare", "shows what strategies take without a limit");
  refuse_both(app, "--fit", "--compare", "shows what strategies take without a limit");
  refuse_both(app, "--host-ranks", "--compare", "has no column for networks");
  refuse_both(app, "--host-ranks", "--fit", "has no column for networks");
  refuse_both(app, "--batch", "--compare", "has no column for peaks");
  refuse_both(app, "--rates", "--compare", "has no column for times");
  refuse_both(app, "--rates", "--fit", "has no column for times");
  refuse_both(app, "--batch", "--largest-batch", "finds it");
  for (const char* option : kRatesOptions)
    if (app.count(option) > 0 && app.count("--rates") == 0)
      throw UsageError(concat(as_typed(app, option),
                              ", which matters for the time of a step alone; give --rates, too"));
  if (given.largest_batch && given.budget.empty())
    throw UsageError(
        "--largest-batch needs the memory of a rank; give --budget, too, e.g. --budget 80GiB");
  if (given.settings.has_config()) return;
  if (app.count("--batch") > 0 || given.largest_batch) {
    if (app.count("--sequence") == 0) refuse_half("--sequence");
    return;
  }
  if (app.count("--sequence") > 0) refuse_half("--batch");
  if (app.count("--rates") > 0)
    throw UsageError(concat(as_typed(app, "--rates"),
                            ", but no batch; give --batch and --sequence, too, e.g. --batch 4 "
                            "--sequence 2048"));
  for (const char* option : kPeakOptions)
    if (app.count(option) > 0)
      throw UsageError(concat(as_typed(app, option),
                              ", which matters for the peak of a step alone; give --batch and "
                              "--sequence, too"));
}

PlanQuestion question_of(const CLI::App& app, const PlanArguments& given) {
  if (given.model.empty() && !given.settings.has_config())
    throw UsageError(
        concat("--model is missing; give a JSON file or one of ", join(model_names(), ", ")));
  check_together(app, given);
  PlanQuestion question;
  question.run = given.settings.read(app);
  question.run.check_adapters();
  question.model = given.model.empty() ? question.run.model : given.model;
  if (!given.ranks.empty())
    question.ranks = parse_whole_number("--ranks", given.ranks, 1, kMaxRanks);
  else if (question.run.ranks > 0)
    question.ranks = question.run.ranks;
  if (!given.host_ranks.empty())
    question.host_ranks = parse_whole_number("--host-ranks", given.host_ranks, 1, kMaxRanks);
  question.is_of_gpu = app.count("--batch") > 0 || given.largest_batch;
  question.has_batch = question.is_of_gpu || (given.settings.has_config() && !given.compare);
  if (question.has_batch) check_sequence(app, question.run);
  if (!given.budget.empty()) question.budget = parse_bytes("--budget", given.budget);
  if (!given.fit.empty()) question.fit = parse_bytes("--fit", given.fit);
  question.rates = rates_of(app, given.time);
  if (!question.ranks && !question.fit && given.calibrate.file.empty())
    throw UsageError("--ranks is missing; give the number of ranks, e.g. --ranks 8");
  return question;
}

// Twice as many again and again, beginning with what the axes need; or those that were asked for.
std::vector<int64_t> rank_counts_of(const PlanQuestion& question) {
  if (question.ranks) return {*question.ranks};
  const train::TrainOptions& run = question.run;
  std::vector<int64_t> counts;
  for (int64_t n = run.outer * std::lcm(run.ep, run.tp); n <= kMostRanksToFit; n *= 2)
    if (!question.has_batch || run.batch % (run.data_parallel_size(n) * run.microbatches) == 0)
      counts.push_back(n);
  if (counts.empty()) static_cast<void>(run.rows_of_rank(run.outer * std::lcm(run.ep, run.tp)));
  return counts;
}

// Ways to take less memory, without settings that somebody gave.
std::string advice(const CLI::App& app, const PlanQuestion& question, const ModelShape& model) {
  const train::TrainOptions& run = question.run;
  const bool has_experts =
      model.layers ? expert_names(*model.layers).has_value() : app.count("--expert-parameters") > 0;
  std::vector<std::string> ways = {"more memory"};
  const auto add = [&](bool helps, const char* option, const char* words) {
    if (helps && app.count(option) == 0) ways.emplace_back(words);
  };
  if (question.ranks) ways.emplace_back("more ranks");
  add(question.has_batch, "--microbatches", "--microbatches");
  add(run.shard.prefetch > 0, "--prefetch", "--prefetch 0");
  add(run.shard.offload.fraction < 1, "--offload", "--offload 1");
  add(has_experts && run.ep == 1, "--ep", "--ep (ranks share out experts)");
  add(has_experts && run.ep > 1 && question.has_batch && question.host_ranks == 0,
      "--expert-exchange", "--expert-exchange exact (the default between hosts: --host-ranks)");
  add(model.layers && run.tp == 1, "--tp", "--tp (ranks share out matrices and tokens)");
  add(question.has_batch && !question.fit, "--recompute", "--recompute block");
  return concat("give ", join(ways, ", or "));
}

void answer_fit(const CLI::App& app, const PlanArguments& given, const PlanQuestion& question,
                const ModelShape& model) {
  const bool is_open =
      app.count("--recompute") == 0 && question.run.build.recompute == Recompute::kNone;
  const FitQuestion fit{
      .options = question.options(1),
      .rank_counts = rank_counts_of(question),
      .num_answers = kFitAnswers,
      .budget_bytes = *question.fit,
      .recompute = is_open ? RecomputeSearch::kIfNeeded : RecomputeSearch::kAsGiven,
      .batch_of = [&](int64_t num_ranks) { return question.batch(num_ranks, model); }};
  const FitAnswer answer = plans_that_fit(model, fit);
  if (answer.plans.empty())
    throw Error(concat("--fit is '", given.fit, "', but on ",
                       question.ranks ? counted_text(*question.ranks, "rank")
                                      : concat("up to ", counted_text(kMostRanksToFit, "rank")),
                       " each needs at least ", bytes_text(answer.least_bytes), "; ",
                       advice(app, question, model)));
  if (!given.json) return print_fits(std::cout, model, *question.fit, answer.plans);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const RankPlan& plan : answer.plans) rows.push_back(to_json(model, plan));
  print_json(rows);
}

std::optional<TimeForecast> time_of(const PlanArguments& given, const PlanQuestion& question,
                                    const Planner& planner, const Forecast& forecast) {
  if (!question.rates) return std::nullopt;
  return forecast_time(
      planner.model(), planner.groups(), forecast, *question.computed(*question.ranks),
      time_options(given.time, question.run.microbatches, question.run.cuda_graph, *question.rates),
      *question.rates);
}

// The batch of all ranks that fills the memory.
int64_t largest_batch(const CLI::App& app, const PlanQuestion& question, const Planner& planner) {
  const train::TrainOptions& run = question.run;
  const int64_t parts = run.data_parallel_size(*question.ranks) * run.microbatches;
  train::TrainOptions least = run;
  least.batch = parts;
  const PeakOptions one = train::peak_options(least, *question.ranks);
  const int64_t rows = most_rows_within(planner, one, *question.budget);
  if (rows == 0)
    throw Error(concat("--budget is ", bytes_text(*question.budget),
                       ", but with one sequence at a "
                       "time a rank needs ",
                       bytes_text(plan_rank(planner, one).bytes()), "; ",
                       advice(app, question, planner.model())));
  return checked_mul(rows, parts);
}

void answer_one(const CLI::App& app, const PlanArguments& given, PlanQuestion question,
                const Planner& planner, double load_seconds) {
  const ModelShape& model = planner.model();
  if (given.largest_batch) question.run.batch = largest_batch(app, question, planner);
  const std::optional<PeakOptions> batch = question.batch(*question.ranks, model);
  const bool is_open = question.budget && !given.largest_batch;
  RankPlan plan =
      is_open ? deepest_within(planner, batch, *question.budget) : plan_rank(planner, batch);
  if (app.count("--recompute") == 0) suggest_recompute(planner, plan);
  if (is_open && plan.bytes() > *question.budget) {
    throw Error(concat("--budget is '", given.budget, "', but a rank needs ",
                       bytes_text(plan.bytes()), " even without prefetch",
                       plan.recomputed_bytes ? concat(" (", bytes_text(*plan.recomputed_bytes),
                                                      " with --recompute block)")
                                             : "",
                       "; ", advice(app, question, model), "; fsdp plan --fit ", given.budget,
                       " says on how many ranks it fits"));
  }
  plan.forecast.plan_seconds += load_seconds;
  const std::optional<TimeForecast> time = time_of(given, question, planner, plan.forecast);
  if (time && !given.time.picture.empty())
    write_file_durably(given.time.picture,
                       picture_page(concat("Forecast: ", model.name, " on ",
                                           counted_text(*question.ranks, "rank")),
                                    *time));
  const Training training{*question.ranks, question.run.tokens, question.run.tokens_per_step()};
  if (given.json) {
    nlohmann::ordered_json json = to_json(model, plan);
    if (question.has_batch) json["batch"] = question.run.batch;
    if (time) json["time"] = to_json(*time, *question.rates, training);
    return print_json(json);
  }
  if (given.largest_batch)
    std::cout << "largest batch within " << given.budget << ": "
              << counted_text(question.run.batch, "sequence") << " of "
              << counted_text(*question.ranks, "rank") << " and " << question.run.microbatches
              << (question.run.microbatches == 1 ? " microbatch" : " microbatches") << "\n\n";
  print_plan(std::cout, model, plan);
  if (!time) return;
  print_time(std::cout, *time, *question.rates, training);
  if (given.time.timeline) print_timeline(std::cout, time->step);
}

// The run of one rank: what it computes at a time.
train::CalibratedRun calibrated_run(const CLI::App& app, const PlanArguments& given) {
  const PlanQuestion question = question_of(app, given);
  const std::optional<PeakOptions> one = question.computed(question.ranks.value_or(1));
  const ModelShape model = load_model(question.model);
  if (!one || !model.layers)
    throw UsageError(
        "--calibrate measures models that can be trained; give a config.json or a known model, "
        "--batch and --sequence, or none of them");
  return {.model = {.name = model.name, .config = *model.layers},
          .options = question.run,
          .rows = one->batch.rows,
          .sequence = one->batch.sequence};
}

void run_plan(const CLI::App& app, const PlanArguments& given) {
  if (!given.calibrate.file.empty()) {
    const bool is_usual = given.model.empty() && !given.settings.has_config();
    return calibrate_machine(given.calibrate,
                             is_usual ? std::nullopt : std::optional(calibrated_run(app, given)));
  }
  for (const char* option : {"--device", "--threads"})
    if (app.count(option) > 0)
      throw UsageError(
          concat(as_typed(app, option), ", which matters for --calibrate alone; drop it"));
  const PlanQuestion question = question_of(app, given);
  const auto start = std::chrono::steady_clock::now();
  ModelShape model = load_model(question.model);
  declare_experts(model, given.expert_parameters);
  add_adapters(model, question.run.build.lora);
  if (question.fit) return answer_fit(app, given, question, model);
  const std::chrono::duration<double> load = std::chrono::steady_clock::now() - start;
  const Planner planner(std::move(model), question.options(*question.ranks));
  if (!given.compare) return answer_one(app, given, question, planner, load.count());
  std::vector<Forecast> forecasts = planner.forecast_all();
  for (Forecast& forecast : forecasts) forecast.plan_seconds += load.count();
  if (!given.json) return print_comparison(std::cout, planner.model(), forecasts);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Forecast& forecast : forecasts) rows.push_back(to_json(planner.model(), forecast));
  print_json(rows);
}

std::string footer() {
  return concat(
      "DTYPE is fp64, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2 or none. Known models: ",
      join(model_names(), ", "),
      ".\nExamples:\n"
      "  fsdp plan --model llama3-8b --ranks 8\n"
      "  fsdp plan --model deepseek-v3 --ranks 4096 --outer 8 --compare\n"
      "  fsdp plan --model config.json --ranks 64 --grad-comm bf16 --main-grads fp32 "
      "--budget 40GiB --json\n"
      "  fsdp plan --model llama3-70b --fit 80GiB --batch 128 --sequence 8192\n"
      "  fsdp plan --model llama3-8b --ranks 64 --budget 80GiB --largest-batch --sequence "
      "8192\n"
      "  fsdp plan --config run.json --ranks 64\n"
      "  fsdp plan --model llama3-8b --ranks 128 --batch 256 --sequence 8192 --rates "
      "h100 --tokens 15T\n"
      "docs/plan.md has every formula.");
}

}  // namespace

Command add_plan(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand(
      "plan", "Forecast memory, traffic and time of a model on any number of ranks");
  app->footer(footer());
  const auto given = std::make_shared<PlanArguments>();
  const char* group = "question";
  const auto option = [&](const char* name, auto& value, const char* type, const char* text) {
    return app->add_option(name, value, text)->type_name(type)->group(group);
  };
  const auto flag = [&](const char* name, bool& value, const char* text) {
    app->add_flag(name, value, text)->group(group);
  };
  given->settings.add_config(*app);
  app->get_option("--config")->group(group);
  option("--model", given->model, "NAME|PATH",
         "A known model, a published config.json or its directory, or a list of units "
         "(docs/plan.md)");
  option("--ranks", given->ranks, "N", "Ranks in all");
  option("--host-ranks", given->host_ranks, "N",
         "Ranks on each host: say what a step costs the network between hosts, and NCCL's memory");
  option("--budget", given->budget, "BYTES",
         "The whole memory of a rank: take the deepest prefetch that fits, e.g. 40GiB");
  flag("--largest-batch", given->largest_batch,
       "Find the largest --batch with which a rank needs no more than --budget");
  option("--fit", given->fit, "BYTES",
         "The whole memory of a rank: say how many ranks, which strategy and whether --recompute "
         "it takes, e.g. 80GiB");
  flag("--compare", given->compare, "All strategies side by side");
  flag("--json", given->json, "Print JSON instead of a table");
  option("--expert-parameters", given->expert_parameters, "GLOB",
         "Tensors of a list of your own with one slice per expert along their first dimension, "
         "for --ep: '*.experts.*'; may be given several times")
      ->allow_extra_args(false);
  add_time_options(*app, given->time);
  group = "rates";
  option("--calibrate", given->calibrate.file, "FILE",
         "Measure the parts of a model with its batch and settings on this machine, without "
         "--model those of a few, and add them to the rates that --rates reads");
  option("--device", given->calibrate.device, "NAME",
         "Where --calibrate measures: auto, cpu or cuda");
  option("--threads", given->calibrate.threads, "N",
         "Of the host, that a rank has when --calibrate measures; default 1, on the host of a GPU "
         "all");
  for (const train::Setting& setting : train::settings())
    if (std::ranges::find(kPlannedSettings, setting.name) != std::end(kPlannedSettings))
      given->settings.add(*app, setting);
  for (const char* name : {"--sequence", "--batch", "--tokens"})  // here they have to be given
    app->get_option(name)->default_str("");
  return {app, [app, given] { run_plan(*app, *given); }};
}

}  // namespace fsdp::cli
