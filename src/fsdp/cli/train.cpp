// `fsdp train`: trains a language model, sharded over threads, processes or hosts.
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/version.h"
#include "fsdp/cli/command.h"
#include "fsdp/cli/progress.h"
#include "fsdp/cli/setting_flags.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/comm/launch.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/comm/world.h"
#include "fsdp/train/environment.h"
#include "fsdp/train/log/console.h"
#include "fsdp/train/machine.h"
#include "fsdp/train/run_data.h"
#include "fsdp/train/run_options.h"
#include "fsdp/train/run_plan.h"
#include "fsdp/train/settings/settings.h"
#include "fsdp/train/stop_request.h"
#include "fsdp/train/torch_warnings.h"
#include "fsdp/train/training_run.h"

namespace fsdp::cli {

namespace {

using train::Setting;
using train::TrainOptions;

struct TrainArguments {
  SettingFlags settings;
  bool print_config = false;
  bool check = false;
  bool saves_nothing = false;
  bool verbose = false;
};

int64_t num_ranks_of(const TrainOptions& options, const Launch& launch) {
  if (launch.size == 1) return std::max<int64_t>(1, options.ranks);
  if (options.ranks != 0 && options.ranks != launch.size)
    throw UsageError(concat("--ranks is ", options.ranks, ", but ", name_of(launch.launcher),
                            " started ", launch.size, " processes; leave --ranks out"));
  return launch.size;
}

std::vector<train::MemoryCheck> memory_checks(const train::RunPlan& plan, const Launch& launch,
                                              c10::Device device) {
  return train::memory_checks(plan, train::ranks_here(launch, plan.num_ranks, device), device.str(),
                              train::device_memory_bytes(device), train::available_host_memory());
}

// Returns whether it fits on this machine.
bool print_check(const train::RunPlan& plan, std::span<const train::MemoryCheck> checks) {
  const train::RunFacts facts{.beginning = train::beginning_text(plan),
                              .title = train::title_of(plan),
                              .settings = train::shown_settings(plan.given, plan.resolved),
                              .memory = train::memory_rows(plan.forecast)};
  std::cout << train::start_tables(facts, train::console_options_for_stdout().width())
            << "data: " << plan.corpus->summary() << "\n"
            << train::length_text(plan.options) << "\n";
  train::warn_of_rows(plan);
  bool fits = true;
  for (const train::MemoryCheck& check : checks) {
    std::cout << check.text() << "\n";
    fits = fits && check.fits();
  }
  std::cout << (fits ? "everything fits together" : "this run does not fit on this machine")
            << "; nothing was trained (--check)\n";
  return fits;
}

// Every fact that decides the numbers of a run or the collectives it issues. Hosts may have the
// same model and data under other names, so those are compared by content.
RankFacts facts_of(const train::RunPlan& plan) {
  RankFacts facts = train::setting_facts(plan.resolved);
  std::erase_if(facts, [](const auto& fact) {
    return fact.first == "--model" || fact.first == "--data" || fact.first == "--validation-data" ||
           fact.first == "--tokenizer";
  });
  facts.emplace_back("fsdp", FSDP_VERSION);
  facts.emplace_back("libtorch", TORCH_VERSION);
  facts.emplace_back("a model with checksum",
                     concat(crc32c(std::as_bytes(std::span(plan.model_config)))));
  if (plan.adapters)
    facts.emplace_back("frozen weights with fingerprint", plan.adapters->fingerprint);
  return facts;
}

// Returns the signal that stopped the run; 0 for none.
int train_as(World& world, const train::RunPlan& plan, const train::StopRequest& stop) {
  const train::QuietTorchWarnings quiet;
  return train::TrainingRun(plan, world, stop, std::cout).train();
}

// Plans after joining the others, so that they notice at once if this process ends while it reads
// its data, and learn why if it fails. Ranks that differ do not begin to train.
template <typename Plan>
int train_as_process(World& world, const Plan& plan_here, std::string& difference) {
  try {
    const train::RunPlan plan = plan_here(&world.communicator());
    difference = difference_of(world.communicator(), facts_of(plan));
    const train::StopRequest stop;
    return difference.empty() ? train_as(world, plan, stop) : 0;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    world.communicator().abort(concat("rank ", world.rank(), " failed: ", error.what()));
    throw;
  }
}

// A line of rank 0 when tokenising takes longer than a moment.
train::DataProgress tokenising_progress(const Launch& launch, bool is_quiet) {
  if (launch.rank != 0 || is_quiet) return {};
  return [line = std::make_shared<TokenisingLine>()](const std::string& what, int64_t done,
                                                     int64_t total) {
    line->update(what, done, total);
  };
}

void run_train(const CLI::App& app, const TrainArguments& given) {
  if (given.verbose) ::setenv("FSDP_LOG", "debug", /*overwrite=*/1);
  log_warnings_only();
  Launch launch = read_launch();
  const TrainOptions options = report_on_rank0(launch, [&] {
    TrainOptions read = given.settings.read(app);
    if (!given.saves_nothing) return read;
    if (read.checkpoint_dir != "auto" && read.checkpoint_dir != "none")
      throw UsageError(concat("--no-save is given, but --checkpoint-dir is '", read.checkpoint_dir,
                              "'; drop one of the two"));
    read.checkpoint_dir = "none";
    return read;
  });
  if (given.print_config) {
    if (launch.rank == 0) std::cout << train::config_text(options);
    return;
  }
  // Contradicting settings come first, because they are wrong on every machine.
  const c10::Device device = report_on_rank0(launch, [&] {
    options.validate(num_ranks_of(options, launch));
    return train::training_device(options, launch.local_rank);
  });
  const auto plan_here = [&](Communicator* ranks) {
    train::RunPlan plan = report_on_rank0(launch, [&] {
      const int64_t num_ranks = num_ranks_of(options, launch);
      const train::RanksHere here = train::ranks_here(launch, num_ranks, device);
      return train::plan_run(options, num_ranks, train::rank_device(options, device, here),
                             {.progress = tokenising_progress(launch, options.quiet),
                              .keeps_tokens = !given.check,
                              .ranks = ranks,
                              .local_rank = launch.local_rank});
    });
    const std::string slow = train::slow_compute_text(plan.compute, device, this_cpu());
    if (launch.rank == 0 && !slow.empty()) log(LogLevel::kWarning, slow);
    if (launch.rank == 0 && options.device == train::DeviceChoice::kAuto)
      if (const std::string idle = train::idle_gpus_text(FSDP_WITHOUT_CUDA); !idle.empty())
        log(LogLevel::kWarning, idle);
    if (launch.local_rank == 0 && !given.check)
      for (const train::MemoryCheck& check : memory_checks(plan, launch, device))
        if (!check.fits()) log(LogLevel::kWarning, check.text());
    return plan;
  };
  if (given.check) {
    const train::RunPlan plan = plan_here(nullptr);
    if (launch.rank == 0 && !print_check(plan, memory_checks(plan, launch, device)))
      throw ExitCode{1};
    return;
  }
  int signal = 0;
  if (launch.size == 1) {
    const train::RunPlan plan = plan_here(nullptr);
    const train::StopRequest stop;
    run_threads(static_cast<int>(plan.num_ranks), train::comm_options(options), [&](World& world) {
      const int stopped_by = train_as(world, plan, stop);
      if (world.rank() == 0) signal = stopped_by;
    });
  } else {
    report_on_failed_rank([&] {
      std::string difference;
      {
        World world = World::from_environment(train::comm_options(options));
        launch = world.launch();  // which has counted the ranks of a GPU
        signal = train_as_process(world, plan_here, difference);
      }
      if (!difference.empty())
        throw UsageError(concat(difference, "; start all ranks with the same"));
    });
  }
  if (signal != 0) throw ExitCode{128 + signal};  // as shells report it
}

constexpr const char* kTrainFooter =
    "fsdp train --help-all shows all settings. A flag that is a yes or no is --FLAG or --no-FLAG. "
    "A config file is a JSON object whose keys are these names with _ for -.\n"
    "Examples:\n"
    "  fsdp train --data docs --ranks 2\n"
    "  fsdp train --data text.bin --model llama-110m --batch 64 --checkpoint-dir runs/a --check\n"
    "  mpirun -n 4 fsdp train --config run.json --steps 1000\n"
    "docs/train.md tells more.";

// Settings that most runs need; --help-all shows the rest, too.
constexpr std::string_view kFirstSettings =
    " model init lora lora-alpha lora-on compute recompute weights data tokenizer validation-data "
    "sequence batch microbatches validate-every steps epochs optimizer lr schedule warmup "
    "weight-decay clip ranks strategy outer tp ep device cuda-graph seed checkpoint-dir "
    "checkpoint-every resume export-dir sample quiet ";

void add_settings(CLI::App& app, SettingFlags& flags) {
  std::vector<CLI::Option*> others;
  for (const Setting& setting : train::settings()) {
    CLI::Option* const option = flags.add(app, setting);
    const bool is_first =
        kFirstSettings.find(concat(" ", setting.name, " ")) != std::string_view::npos;
    if (!is_first) others.push_back(option);
  }
  app.set_help_flag();  // in place of the parser's own, which shows all
  app.add_flag_callback(
      "-h,--help",
      [others] {
        for (CLI::Option* const option : others) option->group("");  // which hides it
        throw CLI::CallForHelp();
      },
      "Print this help and exit");
  app.add_flag_callback(
      "--help-all", [] { throw CLI::CallForHelp(); }, "Print the help of all settings, and exit");
}

}  // namespace

Command add_train(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("train", "Train a language model, sharded over ranks");
  app->footer(kTrainFooter);
  const auto given = std::make_shared<TrainArguments>();
  given->settings.add_config(*app);
  app->add_flag("--print-config", given->print_config,
                "Print all settings as a config file, and do nothing else");
  app->add_flag("--check", given->check,
                "Check everything, show the memory forecast, and do nothing else");
  app->add_flag("--no-save", given->saves_nothing,
                "Save nothing: no checkpoints, log or report, as --checkpoint-dir none says");
  app->add_flag("--verbose", given->verbose,
                "Tell what the engine does, too: pools and their memory, what was cancelled");
  add_settings(*app, given->settings);
  return {app, [app, given] { run_train(*app, *given); }};
}

}  // namespace fsdp::cli
