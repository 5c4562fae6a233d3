#include "fsdp/train/training_run.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <thread>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/env.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/data/tokenizer.h"
#include "fsdp/plan/flops.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/parameter_init.h"
#include "fsdp/train/environment.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/run_options.h"
#include "fsdp/train/settings/settings.h"

namespace fsdp::train {

namespace {

// A model whose gradients are not finite this often in a row does not recover.
constexpr int64_t kMaxSkippedInARow = 50;
// The first step allocates and the second one plans anew; the third is like all others.
constexpr int64_t kTimelineStep = 3;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Divides the cores among the ranks of a process, unless a person has chosen the threads.
void share_cores(const TrainOptions& options, int64_t ranks_here) {
  if (options.threads > 0) return at::set_num_threads(static_cast<int>(options.threads));
  if (env_text("OMP_NUM_THREADS")) return;
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  at::set_num_threads(static_cast<int>(std::max<int64_t>(1, cores / ranks_here)));
}

std::string text_of_schedule(const TrainOptions& options) {
  return concat(name_of(options.schedule), ", ", options.total_steps(), " steps, rate ",
                options.rate());
}

}  // namespace

// The mean over ranks and microbatches of the losses, and whether any rank is to stop.
struct TrainingRun::Metrics {
  bool learns = true;          // any rank had a token to learn
  std::vector<double> values;  // by loss_names_; without such a token NaN
  // Shares of quantised weights in the update before; none where nothing is quantised.
  std::vector<NamedValue> lost;
  int signal = 0;
  bool is_data_damaged = false;  // on any rank
  StepState optimizer;
};

TrainingRun::TrainingRun(const RunPlan& plan, World& world, const StopRequest& stop,
                         std::ostream& out)
    : plan_(plan),
      world_(world),
      stop_(stop),
      mesh_(world.mesh({.outer = static_cast<int>(plan.options.outer),
                        .ep = static_cast<int>(plan.options.ep),
                        .tp = static_cast<int>(plan.options.tp)})),
      device_(training_device(plan.options, world.local_rank())),
      total_steps_(plan.options.total_steps()),
      batches_(plan.options.microbatches,
               plan.options.cuda_graph ? BatchMemory::kSame : BatchMemory::kNew, device_,
               world.communicator()),
      started_(now()) {
  share_cores(options_, options_.ranks > 0 ? options_.ranks : world.launch().local_size);
  at::globalContext().setDeterministicAlgorithms(options_.deterministic, /*warn_only=*/false);
  // Else libtorch writes NaN to all memory that it hands out, for programs that read it unwritten.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  {
    const MetaConstruction meta;
    BuildOptions build = options_.build;
    if (options_.cuda_graph && build.expert_exchange == ExpertExchange::kAuto)
      build.expert_exchange = ExpertExchange::kPadded;  // a recorded step has no host
    build.dtype = scalar_type_of(plan_.compute);
    model_ = build_language_model(plan_.model.config, build);
  }
  sharded_ = fully_shard(std::static_pointer_cast<torch::nn::Module>(model_), mesh_,
                         shard_options(options_, device_));
  optimizer_ = make_optimizer(options_, *sharded_);
  if (options_.cuda_graph)
    graph_ = std::make_unique<Graph>(*sharded_, optimizer_.get(), [this] {
      forward_and_backward();
      update();
    });
  compare_data(plan_, mesh_);
  load();
  weights_out_.emplace(options_, state(), stored_name_rules(*model_), published_, step_);
  if (world_.rank() == 0) begin_watch(out);
  if (options_.trace.empty()) return;
  const auto [first, last] = options_.trace_steps;
  // A run that has fewer steps left traces its last one.
  trace_ = std::make_unique<RunTrace>(options_.trace, std::min(first_step_ + first, total_steps_),
                                      std::min(first_step_ + last, total_steps_), world_, device_);
}

TrainingRun::~TrainingRun() = default;

CheckpointState TrainingRun::state() const {
  return {.sharded = *sharded_,
          .optimizer = optimizer_.get(),
          .buffers = plan_.adapters ? std::vector<NamedBuffer>() : stored_buffers(*model_)};
}

// Weights to begin with; with adapters, the frozen ones under them.
void TrainingRun::load_init(LoadOptions loading) {
  for (const std::string& glob : adapter_globs(options_.build.lora))
    loading.allow_missing.push_back(glob);
  load_checkpoint(plan_.init, {.sharded = *sharded_, .buffers = stored_buffers(*model_)}, loading);
}

void TrainingRun::load() {
  const NameRules names = stored_name_rules(*model_);
  LoadOptions loading = options_.loading;
  loading.names = names;
  loading.ignored = model_->ignored_names();
  const CheckpointState state = this->state();
  std::optional<LoadedCheckpoint> loaded;
  const std::vector<int64_t> steps = options_.checkpoint_dir.empty()
                                         ? std::vector<int64_t>{}
                                         : RunDirectory(options_.checkpoint_dir).steps();
  if (plan_.adapters) load_init(loading);
  sharded_->drop_frozen_numbers();
  loading.only = adapter_globs(options_.build.lora);
  if (plan_.adapters) loading.names = with_names_of_peft(names);
  // Comes before the Checkpointer, so that a failed load leaves no directory behind.
  if (options_.resume != "auto" && options_.resume != "never")
    loaded = load_checkpoint(options_.resume, state, loading);
  const bool is_begun = !loaded && steps.empty();
  if (is_begun && !plan_.init.empty() && !plan_.adapters) load_init(loading);
  if (is_begun && !plan_.init_adapters.empty())
    load_checkpoint(plan_.init_adapters, {.sharded = *sharded_}, loading);
  if (plan_.given.checkpoint_dir == "auto") {
    int64_t time = 0;
    on_all_ranks(mesh_, "making the run's directory", [&] {
      if (world_.rank() == 0) time = make_dated_directory(plan_);
    });
    place_run(plan_, dated_directory(plan_, number_of_rank_0(mesh_, time, "time of the run")));
  }
  // Before the first save, since it may be read from the run's own directory.
  const bool is_written = !options_.checkpoint_dir.empty() || !options_.export_dir.empty();
  if (is_written && world_.rank() == 0) published_ = published_model(plan_);  // who writes it
  if (!options_.checkpoint_dir.empty()) {
    CheckpointerOptions saving = options_.saving;
    saving.form.names = names;
    saving.form.only = loading.only;
    saving.model_config = published_.config;
    saving.model_files = published_.files;
    checkpointer_ = std::make_unique<Checkpointer>(options_.checkpoint_dir, mesh_, saving);
    if (options_.resume == "auto") loaded = checkpointer_->load_latest(state, loading);
  }

  const DataSplit& windows = *plan_.windows;
  DataPosition position =
      first_position(windows.training, options_.build.seed, options_.data_weights);
  if (loaded) {
    step_ = first_step_ = saved_step_ = loaded->step;
    const std::string& text =
        loaded->data_of_ranks.empty() ? loaded->data : loaded->data_of_ranks.front();
    if (!options_.restart_data)
      position = parse_data_position(text, concat(loaded->path, ": data position"));
  }
  const WindowDocuments documents = *options_.documents;
  loader_ = std::make_unique<BatchLoader>(
      TrainingBatches(windows.training, {.batch = options_.batch,
                                         .microbatches = options_.microbatches,
                                         .ranks = mesh_.data_parallel_size(),
                                         .rank = mesh_.data_parallel_rank(),
                                         .seed = options_.build.seed,
                                         .source_weights = options_.data_weights,
                                         .documents = documents}),
      position);
  if (options_.validation_steps() > 0)
    validation_ = std::make_unique<ValidationBatches>(
        windows.validation, ValidationOptions{.batch = options_.batch,
                                              .ranks = mesh_.data_parallel_size(),
                                              .rank = mesh_.data_parallel_rank(),
                                              .max_batches = options_.validation_batches,
                                              .documents = documents});
}

void TrainingRun::begin_watch(std::ostream& out) {
  const bool is_begun = first_step_ == 0 || !plan_.init.empty();
  RunFacts facts{.beginning = is_begun ? beginning_text(plan_) : "",
                 .title = title_of(plan_),
                 .settings = shown_settings(plan_.given, plan_.resolved),
                 .environment = environment_rows(world_.launch(), plan_, device_),
                 .memory = memory_rows(plan_.forecast),
                 .resumed_step = first_step_};
  WatchOptions watch{.log_path = options_.log_path(),
                     .tensorboard_dir = options_.tensorboard,
                     .wandb_project = options_.wandb_project(),
                     .wandb_name = file_name_of(options_.checkpoint_dir),
                     .report_path = options_.report_path(),
                     .console = console_options_for_stdout()};
  watch.console.is_quiet = options_.quiet;
  watch.console.log_every = options_.log_every;
  for (const std::string& path : {watch.log_path, watch.report_path})
    if (!path.empty()) make_directories(directory_of(path));
  const std::string files = files_text(watch, options_.trace);
  watch_ = std::make_unique<RunWatch>(std::move(watch), std::move(facts), out);
  watch_->note(concat("data: ", plan_.corpus->summary()));
  warn_of_rows(plan_);
  if (!world_.transport().empty()) watch_->note(world_.transport());
  watch_->note(length_text(options_));
  if (!files.empty()) watch_->note(files);
  if (plan_.given.checkpoint_dir == "auto")
    watch_->note(concat("saved in ", options_.checkpoint_dir,
                        ", since no --checkpoint-dir is named (--no-save: nowhere)"));
}

int TrainingRun::train() {
  try {
    const int signal = train_steps();
    end(signal);
    return signal;
  } catch (...) {
    report_end("an error");
    throw;
  }
}

int TrainingRun::train_steps() {
  if (step_ >= total_steps_ && watch_)
    watch_->note(concat("step ", step_, " of ", total_steps_,
                        " is done already; give more --steps to train on"));
  std::optional<StepRecorder> recorder;  // of what the host does, for the report
  int signal = 0;
  while (step_ < total_steps_ && signal == 0) {
    const bool is_recorded =
        watch_ && step_ + 1 == std::min(first_step_ + kTimelineStep, total_steps_);
    if (is_recorded) recorder.emplace(TraceDetail::kAll, at::kCPU);
    if (trace_) trace_->begin_step(step_ + 1);
    const double begin = now();
    const double logging = overhead_;  // of the step before; it is part of this step's time
    const Metrics metrics = step();
    const double seconds = now() - begin + logging;
    if (is_recorded) {
      watch_->timeline(timeline_of(recorder->end()));
      recorder.reset();
    }
    if (trace_) trace_->end_step(step_);
    if (trace_ && trace_->ends_with(step_)) end_trace();
    const double done = now();
    record(metrics, seconds);
    overhead_ = now() - done;
    signal = metrics.signal;
    if (is_due(options_.validation_steps())) validate();
    const bool is_patched = !options_.patches.empty() && is_due(options_.patch_every);
    if (metrics.is_data_damaged || is_patched) confirm_data(plan_, mesh_);
    if (is_patched) weights_out_->write_patch(step_);
    if (is_due(options_.checkpoint_every)) save();
    if (is_due(options_.export_every)) export_weights();
    report_saved();
  }
  end_trace();
  return signal;
}

void TrainingRun::end_trace() {
  if (!trace_) return;
  optimizer_->wait();  // the update of a traced step runs on after it
  trace_->end();
}

void TrainingRun::forward_and_backward() {
  RECORD_FUNCTION("fsdp::forward_and_backward", {});
  losses_ = at::Tensor();
  const int64_t parts = batches_.size();
  for (int64_t part = 0; part < parts; ++part) {
    const ModelBatch& batch = batches_[part];
    sharded_->microbatch({.last = part + 1 == parts});
    const ModelLoss loss = model_->loss(batch.tokens, batch.targets, batch.documents);
    const at::Tensor share = batches_.share(part);
    const at::Tensor equal = parts == 1 ? loss.total : loss.total / parts;
    optimizer_->scaled(share.defined() ? loss.total * share : equal).backward();
    const double computed = now();
    std::vector<at::Tensor> values = {loss.total.detach()};
    loss_names_ = {"loss"};
    for (const LossTerm& term : loss.terms) {
      loss_names_.push_back(term.name);
      values.push_back(term.value);
    }
    at::Tensor stacked = at::stack(values).to(at::kDouble);
    if (share.defined()) stacked = stacked * share * parts;
    losses_ = losses_.defined() ? losses_.add_(stacked) : stacked;
    overhead_ += now() - computed;
  }
}

void TrainingRun::update() {
  RECORD_FUNCTION("fsdp::update", {});
  optimizer_->step();
  optimizer_->zero_grad();
  model_->end_step(mesh_);
}

TrainingRun::Metrics TrainingRun::step() {
  optimizer_->set_learning_rate(learning_rate(options_.rate_options(), step_ + 1));
  const double asked = now();
  batches_.load(*loader_);
  overhead_ += now() - asked;
  const bool learns = batches_.have_targets();
  if (learns && graph_) graph_->run();
  if (learns && !graph_) forward_and_backward();
  // Ranks may get a signal in different steps; here all learn of it in the same one.
  const double computed = now();
  const int signal = stop_.signal();
  const at::Tensor heard = at::tensor({signal == SIGINT ? 1.0 : 0.0, signal == SIGTERM ? 1.0 : 0.0,
                                       plan_.data_check->has_failed() ? 1.0 : 0.0},
                                      at::kDouble);
  if (!learns && loss_names_.empty()) loss_names_ = {"loss"};
  const at::Tensor losses =
      learns ? losses_
             : at::full({static_cast<int64_t>(loss_names_.size())}, std::nan(""), heard.options())
                   .to(device_);
  at::Tensor sums = at::cat({losses, sharded_->take_cast_counts(), heard.to(device_)});
  Work agreed = world_.communicator().all_reduce(sums, {.op = ReduceOp::kAvg}, "losses");
  overhead_ += now() - computed;
  if (learns && !graph_) update();
  agreed.wait();
  ++step_;

  sums = sums.to(at::kCPU);
  const double* values = sums.const_data_ptr<double>();
  const size_t num_losses = loss_names_.size();
  Metrics metrics;
  metrics.learns = learns;
  for (size_t i = 0; i < num_losses; ++i)
    metrics.values.push_back(values[i] / static_cast<double>(options_.microbatches));
  values += num_losses;
  if (const double num_cast = values[2]; num_cast > 0)  // of all ranks alike
    metrics.lost = {{"overflow", values[0] / num_cast}, {"underflow", values[1] / num_cast}};
  values += 3;
  metrics.signal = values[0] > 0 ? SIGINT : values[1] > 0 ? SIGTERM : 0;
  metrics.is_data_damaged = values[2] > 0;
  metrics.optimizer = optimizer_->state();
  return metrics;
}

void TrainingRun::record(const Metrics& metrics, double seconds) {
  const bool is_skipped = metrics.learns && metrics.optimizer.skips != 0;
  num_skipped_ = is_skipped ? num_skipped_ + 1 : 0;
  if (watch_) {
    StepRecord record{
        .step = step_,
        .total_steps = total_steps_,
        .loss = metrics.values.front(),
        .learning_rate = optimizer_->learning_rate(),
        .gradient_norm = metrics.learns ? metrics.optimizer.norm : 0,
        .milliseconds = seconds * 1e3,
        .overhead_milliseconds = overhead_ * 1e3,
        .tokens_per_second = static_cast<double>(options_.tokens_per_step()) / seconds,
        .peak_bytes = peak_memory_bytes(device_),
        .tokens = step_ * options_.tokens_per_step(),
        .is_skipped = is_skipped || !metrics.learns,
        .learns = metrics.learns};
    // The peak of a CPU is not known, so its figure would say nothing.
    const double peak = plan_.resolved.peak_tflops.value_or(0);
    if (!device_.is_cpu() || peak > 0)
      record.teraflops =
          record.tokens_per_second *
          flops_per_token(plan_.model.config, options_.sequence_length(), options_.build.lora) /
          static_cast<double>(plan_.num_ranks) / 1e12;
    if (peak > 0) record.mfu = record.teraflops / peak;
    for (size_t i = 1; i < loss_names_.size(); ++i)
      record.terms.push_back({loss_names_[i], metrics.values[i]});
    record.terms.insert(record.terms.end(), metrics.lost.begin(), metrics.lost.end());
    watch_->step(std::move(record));
  }
  FSDP_CHECK(
      num_skipped_ < kMaxSkippedInARow, "gradients were NaN or Inf in ", num_skipped_,
      " steps in a row, up to step ", step_,
      ", so the model learns nothing any more; go back to an earlier checkpoint with a lower "
      "--lr, or find the parameter with --name-nan");
}

void TrainingRun::validate() {
  if (!validation_ || validation_->num_batches() == 0) return;
  validated_step_ = step_;
  const double begin = now();
  const MeanLoss mean =
      mean_loss(*model_, *validation_, device_, world_.communicator(), mesh_.data_parallel_size());
  if (!watch_) return;
  if (mean.tokens == 0) return watch_->note("validation: its batches have no token to learn");
  watch_->validation({.step = step_,
                      .loss = mean.loss,
                      .tokens = mean.tokens,
                      .milliseconds = (now() - begin) * 1e3});
}

// A failed save costs a checkpoint, not the run: the checkpoints before remain, and the next one
// may succeed. The error of the last save ends the run.
void TrainingRun::save() {
  if (!checkpointer_ || saved_step_ == step_) return;
  confirm_data(plan_, mesh_);
  saved_step_ = step_;
  const double begin = now();
  try {
    checkpointer_->save(state(), {.step = step_,
                                  .schedule = text_of_schedule(options_),
                                  .data = to_json(loader_->position())});
  } catch (const RemoteError&) {
    // The rank that failed says why. If it has left, the next collective throws.
  } catch (const Error& error) {
    log(LogLevel::kError, error.what());
  }
  blocked_ms_ = (now() - begin) * 1e3;
}

void TrainingRun::export_weights() {
  if (!options_.export_dir.empty()) confirm_data(plan_, mesh_);
  const std::string line = weights_out_->write_export(step_);
  if (watch_ && !line.empty()) watch_->note(line);
}

void TrainingRun::report_saved() {
  if (!checkpointer_) return;
  for (const SavedCheckpoint& saved : checkpointer_->take_saved())
    if (watch_)
      watch_->checkpoint({.step = saved.step,
                          .path = saved.path,
                          .bytes = saved.bytes,
                          .blocked_milliseconds = blocked_ms_,
                          .milliseconds = saved.seconds * 1e3});
}

void TrainingRun::end(int signal) {
  confirm_data(plan_, mesh_);
  if (signal == 0 && validation_ && validated_step_ != step_ && step_ > first_step_) validate();
  weights_out_->write_patch(step_);
  save();
  if (checkpointer_) checkpointer_->wait();
  export_weights();
  report_saved();
  if (signal == 0 && !options_.sample.empty()) write_sample();
  if (watch_ && !options_.data_weights.empty()) watch_->note(text_of_epochs());
  weights_out_->end();
  report_end(signal == 0 ? "" : signal_name(signal));
}

std::string TrainingRun::text_of_epochs() const {
  const std::vector<double> epochs = loader_->epochs();
  std::vector<std::string> texts;
  for (size_t i = 0; i < epochs.size(); ++i)
    texts.push_back(concat(options_.data[i], " ", std::round(epochs[i] * 1e3) / 1e3));
  return concat("epochs of the data: ", join(texts, ", "));
}

void TrainingRun::write_sample() {
  if (watch_ && !plan_.no_sample.empty()) watch_->note(plan_.no_sample);
  if (plan_.sample_prompt.empty()) return;
  if (mesh_.tp() != nullptr) {
    if (watch_) watch_->note("no sample: ranks of a tp group do not decode");
    return;
  }
  const std::vector<int64_t> tokens = generate(*model_, plan_.sample_prompt,
                                               {.max_tokens = options_.sample_tokens,
                                                .temperature = 0.8,
                                                .top_p = 0.95,
                                                .seed = options_.build.seed,
                                                .end_tokens = plan_.end_tokens,
                                                .max_context = options_.sequence_length()},
                                               device_);
  if (!watch_) return;
  try {
    const std::shared_ptr<const Tokenizer> tokenizer = open_tokenizer(plan_.tokenizer);
    tokenizer->begin_text(plan_.sample_prompt);
    watch_->sample({step_, plan_.sample, tokenizer->next_text(tokens)});
  } catch (const Error& error) {
    // The run is done and saved; a tokenizer that is gone by now must not make it fail.
    watch_->note(concat("no sample: ", error.what()));
  }
}

void TrainingRun::report_end(const std::string& stopped_by) {
  if (!watch_) return;
  std::vector<MemoryRow> memory = memory_rows(plan_.forecast);
  add_measured(memory, sharded_->memory());
  watch_->memory(std::move(memory));
  watch_->end({.step = step_,
               .num_steps = step_ - first_step_,
               .seconds = now() - started_,
               .stopped_by = stopped_by});
  if (!stopped_by.empty() && plan_.given.checkpoint_dir == "auto")
    watch_->note(concat("to go on, give --checkpoint-dir ", options_.checkpoint_dir, ", too"));
}

}  // namespace fsdp::train
