#include "fsdp/train/run_plan.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/data/token_windows.h"
#include "fsdp/nn/config/config_json.h"
#include "fsdp/nn/config/presets.h"
#include "fsdp/plan/load_model.h"
#include "fsdp/plan/model_adapters.h"
#include "fsdp/plan/model_tensors.h"
#include "fsdp/shard/registered_pool.h"
#include "fsdp/train/environment.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/run_data.h"
#include "fsdp/train/run_sequence.h"

namespace fsdp::train {

namespace {

constexpr const char* kRandomWeights = "none";  // --init
constexpr double kTunedRate = 2e-5;             // of weights that somebody has trained
constexpr double kAdapterRate = 2e-4;           // of adapters on such weights

// Called after the preset, or the directory of config.json.
std::string directory_of_run(std::string model, const std::string& date) {
  if (file_name_of(model) == "config.json") model = directory_of(model);
  while (model.ends_with('/')) model.pop_back();
  const std::string file = file_name_of(model);
  const std::string name = file.substr(0, file.rfind(".json"));
  return concat("runs/", name.find_first_not_of('.') == name.npos ? "model" : name, "-", date);
}

[[noreturn]] void refuse_model(const std::string& name) {
  const std::vector<std::string> presets = preset_names();
  for (const std::string& known : model_names())
    if (known == name)
      throw UsageError(concat("--model is '", name,
                              "', which can be planned (fsdp plan) but not "
                              "trained; the presets are ",
                              join(presets, ", ")));
  const std::string near = nearest(name, presets);
  throw UsageError(concat("--model is '", name, "', which is not known; ",
                          near.empty() ? "the" : concat("did you mean '", near, "'? The"),
                          " presets are ", join(presets, ", "), ", or give a config.json"));
}

std::string millions(int64_t count) {
  std::ostringstream text;
  const double value = static_cast<double>(count);
  text << std::fixed << std::setprecision(1);
  if (value >= 1e9)
    text << value / 1e9 << " B";
  else
    text << value / 1e6 << " M";
  return text.str();
}

bool holds_weights(const std::string& directory) {
  for (const std::string& name : names_in(directory))
    if (name == kManifestName || name.ends_with(".safetensors")) return true;
  return false;
}

// The directory that --model names; "": it has no weights.
std::string weights_of_model(const std::string& model) {
  const bool is_theirs = find_preset(model) == nullptr && is_directory(model);
  return is_theirs && holds_weights(model) ? model : "";
}

}  // namespace

std::string init_of(const TrainOptions& options) {
  if (options.init.empty()) return weights_of_model(options.model);
  return options.init == kRandomWeights ? "" : options.init;
}

PlanOptions plan_options(const TrainOptions& o, int64_t num_ranks, DType compute) {
  const ShardOptions& shard = o.shard;
  PlanOptions plan{.ranks = num_ranks,
                   .outer = o.outer,
                   .ep = o.ep,
                   .tp = o.tp,
                   .strategy = shard.strategy,
                   .compute = compute,
                   .precision = shard.precision.types(),
                   .weights = shard.quantization.recipe,
                   .weights_except = shard.quantization.except,
                   .offload = shard.offload.fraction,
                   .pool = shard.pool,
                   .other_units = other_units_with(shard.user_buffers, shard.other_units),
                   .prefetch = shard.prefetch,
                   .granularity = shard.granularity,
                   .marks_changes = !o.patches.empty()};
  const bool is_sgd = o.optimizer == OptimizerChoice::kSgd;
  if (!is_sgd || o.sgd_momentum() != 0) plan.precision.first_moment = o.moments.first;
  if (!is_sgd) plan.precision.second_moment = o.moments.second;
  if (o.optimizer == OptimizerChoice::kMuon) {
    plan.muon = compute == DType::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
    plan.muon_except = shard.matrices.except;
  }
  if (shard.pool_budget_bytes != 0) plan.pool_budget_bytes = shard.pool_budget_bytes;
  return plan;
}

PeakOptions peak_options(const TrainOptions& o, int64_t num_ranks) {
  return {.batch = {.rows = o.rows_of_rank(num_ranks), .sequence = o.sequence_length()},
          .gradient_lifetime = o.shard.gradient_lifetime,
          .logit_bytes = o.build.logit_bytes,
          .recomputes_blocks = o.build.recompute == Recompute::kBlock,
          .expert_capacity = o.build.expert_capacity,
          .pads_experts = o.build.expert_exchange != ExpertExchange::kExact,
          .weight_gradient = o.shard.quantization.weight_gradient};
}

NamedModel find_model(const std::string& name_or_path) {
  if (const ModelPreset* preset = find_preset(name_or_path)) return {name_or_path, preset->config};
  const std::string path = config_path(name_or_path);
  if (path.empty()) refuse_model(name_or_path);
  if (!path_exists(path))
    throw UsageError(concat("--model is '", name_or_path, "', but there is no file '", path,
                            "'; give a preset (", join(preset_names(), ", "),
                            "), a config.json, or a directory with one"));
  NamedModel model{path, parse_model_config(read_text_file(path, kMaxConfigBytes), path)};
  try {
    check_trainable(model.config);
  } catch (const UsageError& error) {
    // Errors about fields that cannot be computed name the file themselves.
    const std::string what = error.what();
    throw UsageError(what.starts_with(path) ? what : concat(path, ": ", what));
  }
  return model;
}

namespace {

void check_experts(const RunPlan& plan) {
  const TrainOptions& o = plan.options;
  const std::optional<ExpertNames> experts = expert_names(plan.model.config);
  if (o.ep > 1 && !experts)
    throw UsageError(
        concat("--ep is ", o.ep, ", but model '", plan.model.name, "' has no experts; drop --ep"));
  if (!o.cuda_graph || !experts) return;
  // Grouped products that know their sizes on the device alone are libtorch's, for these matrices.
  if (plan.compute != DType::kBFloat16 || experts->hidden_size % 8 != 0 ||
      experts->intermediate_size % 8 != 0)
    throw UsageError(concat("--cuda-graph cannot record model '", plan.model.name,
                            "' with --compute ", name_of(plan.compute), ", hidden_size ",
                            experts->hidden_size, " and intermediate_size ",
                            experts->intermediate_size,
                            ": only for bf16 and multiples of 8 the host need not know how many "
                            "tokens each expert gets; change them, or drop --cuda-graph"));
}

void check_directory(const char* option, const std::string& path) {
  if (!path.empty() && path_exists(path) && !is_directory(path))
    throw UsageError(concat(option, " is '", path, "', which is a file; name a directory"));
}

void check_file(const char* option, const std::string& path) {
  if (is_directory(path))
    throw UsageError(concat(option, " is '", path, "', which is a directory; name a file in it"));
  const std::string directory = path.empty() ? "." : directory_of(path);
  if (path_exists(directory) && !is_directory(directory))
    throw UsageError(
        concat(option, " is '", path, "', but '", directory, "' is a file; name another place"));
}

std::vector<int64_t> steps_of(const TrainOptions& options) {
  if (options.checkpoint_dir.empty()) return {};
  return RunDirectory(options.checkpoint_dir).steps();
}

// Finds early what else would fail only after the model and the checkpoint's directory are made.
void check_places(const TrainOptions& options) {
  check_directory("--checkpoint-dir", options.checkpoint_dir);
  check_directory("--export-dir", options.export_dir);
  check_directory("--tensorboard", options.tensorboard);
  check_directory("--patches", options.patches);
  check_file("--log", options.log_path());
  check_file("--report", options.report_path());
  check_file("--trace", options.trace);
  for (const std::string& path : {options.init, options.resume})
    if (!path.empty() && path != "auto" && path != "never" && path != kRandomWeights)
      static_cast<void>(checkpoint_or_files(path));
  const std::vector<int64_t> steps = steps_of(options);
  if (options.resume != "auto" && !steps.empty())
    throw UsageError(concat("--checkpoint-dir is '", options.checkpoint_dir,
                            "', which holds checkpoints up to step ", steps.back(),
                            ", but --resume is '", options.resume,
                            "'; give a new directory, or --resume auto to go on with it"));
}

// Loaded weights must be of the run's model, unless a flag allows missing or extra tensors.
void check_loaded_model(const RunPlan& plan) {
  const TrainOptions& options = plan.options;
  const ModelConfig& model = plan.model.config;
  const bool is_continued = options.resume == "auto" && !steps_of(options).empty();
  const bool is_resumed = options.resume != "auto" && options.resume != "never";
  const std::string resumed = is_continued ? resolve_checkpoint(options.checkpoint_dir)
                              : is_resumed ? checkpoint_or_files(options.resume)
                                           : "";
  if (!resumed.empty()) check_same_adapters(resumed, plan.adapters, "--checkpoint-dir");
  if (!plan.init_adapters.empty()) check_same_adapters(plan.init_adapters, plan.adapters, "--init");
  const std::string init = plan.init.empty() ? "" : checkpoint_or_files(plan.init);
  if (!init.empty()) check_same_adapters(init, std::nullopt, "--init");
  const LoadOptions& loading = options.loading;
  if (loading.extra == LoadOptions::Extra::kAllow || !loading.allow_missing.empty()) return;
  if (!resumed.empty())
    check_same_model(resumed, model, ModelAspect::kResults,
                     is_continued
                         ? "train the same --model, or choose another --checkpoint-dir"
                         : "train the same --model, or take the weights alone with --init");
  else if (!init.empty())
    check_same_model(init, model, ModelAspect::kTensors, "give the --model of these weights");
}

// Adapters to begin with lie on weights of their own, which are loaded first.
void find_init_adapters(RunPlan& plan) {
  if (plan.init.empty() || !plan.options.build.lora.is_on()) return;
  const std::string init = checkpoint_or_files(plan.init);
  const std::optional<AdapterDescription> stored = stored_adapters(init);
  if (!stored) return;
  const bool is_named = !plan.given.init.empty();
  plan.init_adapters = init;
  plan.init = find_base(*stored, is_named ? weights_of_model(plan.given.model) : "",
                        is_named ? "--model" : "--model, and that of the adapters with --init");
}

// Gives the model the vocabulary of --vocabulary; or a preset that of the data, rounded up to a
// multiple of 64, if it has more tokens. UsageError if the model has fewer than the data.
void fit_vocabulary(RunPlan& plan) {
  constexpr int64_t kMultiple = 64;  // matrices of such sizes are multiplied faster
  ModelConfig& model = plan.model.config;
  const int64_t needed = plan.corpus->vocabulary();
  std::optional<int64_t> wanted = plan.options.vocabulary;
  if (!wanted && find_preset(plan.options.model) != nullptr && vocab_size_of(model) < needed)
    wanted = (needed + kMultiple - 1) / kMultiple * kMultiple;
  if (wanted && *wanted != vocab_size_of(model)) {
    nlohmann::ordered_json config = nlohmann::ordered_json::parse(config_json(model));
    config["vocab_size"] = *wanted;
    model = parse_model_config(config.dump(), plan.model.name);
  }
  plan.corpus->check_model_vocabulary(vocab_size_of(model));
  if (plan.validation) plan.validation->check_model_vocabulary(vocab_size_of(model));
}

// Sets the steps that --epochs stands for, and checks them with the rest.
void set_steps(RunPlan& plan, int64_t num_windows) {
  TrainOptions& options = plan.options;
  if (options.epochs == 0) return;
  const double num_used = std::ceil(options.epochs * static_cast<double>(num_windows));
  constexpr double kMostUsed = 1e15;
  if (num_used > kMostUsed)
    throw UsageError(concat("--epochs is ", options.epochs, ", which is more than ", kMostUsed,
                            " sequences; lower it"));
  TrainOptions counted = options;
  counted.epochs = 0;
  counted.steps = ceil_div(static_cast<int64_t>(num_used), options.batch);
  counted.validate(plan.num_ranks);
  options.steps = counted.steps;
}

}  // namespace

RunPlan plan_run(const TrainOptions& given, int64_t num_ranks, const RankDevice& device,
                 const DataOpening& opening) {
  RunPlan plan{.given = given,
               .options = given,
               .resolved = {},
               .num_ranks = num_ranks,
               .compute = device.compute,
               .model = find_model(given.model),
               .model_config = {},
               .init = init_of(given),
               .init_adapters = {},
               .tokenizer = {},
               .corpus = nullptr,
               .validation = nullptr,
               .forecast = {}};
  TrainOptions& options = plan.options;
  const LoraOptions& lora = options.build.lora;
  if (!options.lr && !plan.init.empty()) options.lr = lora.is_on() ? kAdapterRate : kTunedRate;
  options.validate(num_ranks);
  if (lora.is_on() && plan.init.empty())
    throw UsageError(concat("--lora is ", lora.rank,
                            ", but no weights are loaded; give a --model "
                            "directory with weights, or --init"));
  find_init_adapters(plan);
  if (given.checkpoint_dir == "auto")
    options.checkpoint_dir = directory_of_run(plan.model.name, "DATE");
  else if (given.checkpoint_dir == "none")
    options.checkpoint_dir = "";
  check_places(options);
  const int64_t positions = max_positions_of(plan.model.config);
  // Loaded weights have sequences that fit them.
  if ((options.sequence || plan.init.empty()) && options.sequence_length() > positions)
    throw UsageError(concat("--sequence is ", options.sequence_length(), ", more than the ",
                            positions, " positions (max_position_embeddings) of model '",
                            plan.model.name, "'; lower it, or raise that in a config.json"));
  check_experts(plan);
  open_data(plan, opening);
  choose_sequence(plan);
  check_documents(plan);
  fit_vocabulary(plan);
  plan.model_config = config_json(plan.model.config);
  ModelShape shape = build_model(plan.model.name, plan.model.config);
  const std::vector<std::string> adapted = add_adapters(shape, lora);
  if (lora.is_on()) {
    plan.adapters =
        describe_adapters(lora, adapted, checkpoint_or_files(plan.init), plan.model.config);
    plan.adapter_parameters = num_adapter_parameters(shape);
  }
  check_loaded_model(plan);
  check_tensor_ranks(plan.model.config, options.tp);
  const Planner planner(std::move(shape), plan_options(options, num_ranks, device.compute));
  plan.forecast = planner.forecast();
  fit_sequence(plan, planner, device);
  plan.windows = split_data(plan);
  set_steps(plan, plan.windows->training.num_windows());
  plan.resolved = options.resolved(num_ranks, device);
  plan.resolved.vocabulary = vocab_size_of(plan.model.config);
  if (plan.validation && options.validation_steps() > 0)
    plan.windows->validation =
        all_windows(plan.validation, options.sequence_length(), content_of(*options.documents));
  return plan;
}

std::vector<MemoryRow> memory_rows(const Forecast& forecast) {
  const MemoryBytes& bytes = forecast.bytes;
  std::vector<MemoryRow> rows = {
      {.kind = "weights", .forecast_bytes = bytes.weight},
      {.kind = "main weights", .forecast_bytes = bytes.main_weight},
      {.kind = "main gradients", .forecast_bytes = bytes.main_grad},
      {.kind = "moments", .forecast_bytes = bytes.moments},
      {.kind = "pool", .forecast_bytes = bytes.weight_pool + bytes.grad_pool},
  };
  if (bytes.workspace > 0) rows.push_back({.kind = "workspace", .forecast_bytes = bytes.workspace});
  if (bytes.host.total() > 0)
    rows.push_back({.kind = "offloaded", .forecast_bytes = bytes.host.total(), .is_on_host = true});
  return rows;
}

std::string title_of(const RunPlan& plan) {
  return concat(
      plan.model.name, ": ", millions(plan.forecast.parameters), " parameters",
      plan.adapters ? concat(", ", millions(plan.adapter_parameters), " of them trained,") : "",
      " in ", counted_text(plan.forecast.num_units, "unit"), " on ",
      counted_text(plan.num_ranks, "rank"));
}

std::string length_text(const TrainOptions& options) {
  const int64_t tokens = options.total_steps() * options.tokens_per_step();
  return concat(grouped_text(options.total_steps()), " steps of ",
                grouped_text(options.tokens_per_step()), " tokens: ", grouped_text(tokens),
                " tokens in all");
}

std::string beginning_text(const RunPlan& plan) {
  const bool is_tuned = !plan.init.empty();
  std::vector<std::string> chosen;
  if (!plan.given.lr) chosen.push_back(concat("--lr ", plan.options.rate()));
  if (!plan.given.validate_every)
    chosen.push_back(concat("--validate-every ", plan.options.validation_steps()));
  if (!plan.given.sequence && is_tuned)
    chosen.push_back(
        concat("--sequence ", plan.options.sequence_length(),
               plan.sequence_reason.empty() ? "" : concat(" (", plan.sequence_reason, ")")));
  if (!plan.given.documents && plan.options.documents == WindowDocuments::kPacked)
    chosen.emplace_back("--documents packed");
  const LoraOptions& lora = plan.options.build.lora;
  const char* const reason = lora.is_on() ? "adapters are trained"
                             : is_tuned   ? "weights are loaded"
                                          : "no weights are loaded";
  return concat(
      lora.is_on()
          ? concat("training adapters (LoRA) of rank ", lora.rank, ", alpha ",
                   lora.resolved_alpha(), ", on the weights of ", plan.init,
                   plan.init_adapters.empty() ? "" : concat(", from those of ", plan.init_adapters))
      : is_tuned ? concat("fine-tuning the weights of ", plan.init)
                 : concat("training random weights, seed ", plan.options.build.seed),
      chosen.empty() ? "" : concat(": ", join(chosen, ", "), ", because ", reason),
      is_tuned && !lora.is_on() && plan.given.init.empty() ? " (--init none: random ones)" : "");
}

void place_run(RunPlan& plan, const std::string& directory) {
  plan.options.checkpoint_dir = plan.resolved.checkpoint_dir = directory;
  plan.resolved.log = plan.options.log_path();
  plan.resolved.report = plan.options.report_path();
}

std::string dated_directory(const RunPlan& plan, int64_t time) {
  return directory_of_run(plan.model.name, time_text("%Y%m%d-%H%M%S", time));
}

int64_t make_dated_directory(const RunPlan& plan) {
  for (int64_t time = std::time(nullptr);; ++time)
    if (make_directories(dated_directory(plan, time))) return time;
}

}  // namespace fsdp::train
