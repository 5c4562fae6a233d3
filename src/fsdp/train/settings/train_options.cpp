#include "fsdp/train/settings/train_options.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/option_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/data/token_windows.h"

namespace fsdp::train {

namespace {

constexpr std::string_view kWandb = "wandb:";

void check_division(const TrainOptions& o, int64_t num_ranks) {
  if (num_ranks % o.outer != 0)
    throw UsageError(concat("--outer is ", o.outer, ", which does not divide ", num_ranks,
                            num_ranks == 1 ? " rank" : " ranks", "; give a divisor"));
  if (o.build.expert_capacity != 0 && o.build.expert_capacity < 1)
    throw UsageError(concat("--expert-capacity is ", o.build.expert_capacity,
                            ", less than an even load takes; give 1 or more, or 0 for no limit"));
  if (o.cuda_graph && o.ep > 1 && o.build.expert_exchange == ExpertExchange::kExact)
    throw UsageError(
        "--expert-exchange is 'exact', for which the host waits in every layer, and --cuda-graph "
        "records steps without the host; drop one of the two");
  if (num_ranks / o.outer % o.tp != 0)
    throw UsageError(concat("--tp is ", o.tp, ", which does not divide ",
                            counted_text(num_ranks / o.outer, "rank"),
                            o.outer == 1 ? "" : " of a row (all / --outer)", "; give a divisor"));
  if (o.sequence_length() % o.tp != 0)
    throw UsageError(concat("--sequence is ", o.sequence_length(), ", which --tp ", o.tp,
                            " ranks cannot share evenly; give a multiple of ", o.tp, ", e.g. ",
                            round_up(o.sequence_length(), o.tp)));
  static_cast<void>(o.rows_of_rank(num_ranks));
}

void check_length(const TrainOptions& o) {
  if (o.epochs == 0) return;
  const bool has_tokens = o.tokens != 0;
  if (has_tokens || o.steps != TrainOptions{}.steps)
    throw UsageError(concat("--epochs is ", o.epochs, " and ", has_tokens ? "--tokens" : "--steps",
                            " is ", has_tokens ? o.tokens : o.steps,
                            "; a run is as long as one of them says, so drop the other"));
}

void check_rate(const TrainOptions& o) {
  if (o.min_lr && *o.min_lr > o.rate() && o.schedule != RateSchedule::kConstant)
    throw UsageError(concat("--min-lr is ", *o.min_lr, ", above --lr = ", o.rate(),
                            "; lower it, or use --schedule constant"));
  if (o.schedule == RateSchedule::kWsd && o.decay_steps == 0)
    throw UsageError(
        "--schedule is wsd, but --decay-steps is 0; say how many of the last steps "
        "decay");
  if (o.schedule != RateSchedule::kWsd && o.decay_steps != 0)
    throw UsageError(concat("--decay-steps is ", o.decay_steps, ", but --schedule is ",
                            name_of(o.schedule), "; only wsd has them"));
  if (o.warmup && *o.warmup > o.total_steps())
    throw UsageError(concat("--warmup is ", *o.warmup, ", more than the ", o.total_steps(),
                            " steps in all; lower it"));
  const int64_t warmup = o.rate_options().warmup_steps;
  if (o.decay_steps > o.total_steps() - warmup)
    throw UsageError(concat("--decay-steps is ", o.decay_steps, ", but of ", o.total_steps(),
                            " steps ", warmup, " warm up; lower it, or --warmup"));
  o.rate_options().validate();
}

// Names the flags; the engine would refuse the same types by the names of its fields.
void check_types(const TrainOptions& o) {
  struct Rule {
    const char* option;
    std::optional<DType> value;
    std::vector<DType> allowed;
    const char* other;  // the alternative
  };
  const std::vector<DType> trained = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const std::vector<DType> sums = {DType::kFloat64, DType::kFloat32, DType::kBFloat16,
                                   DType::kFloat16};
  const std::vector<DType> moments = {DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                      DType::kFloat8E4M3, DType::kFloat8E5M2};
  const PrecisionTypes precision = o.shard.precision.types();
  for (const Rule& rule : {Rule{"--compute", o.compute, trained, "auto"},
                           Rule{"--main-params", precision.main_params, {DType::kFloat32}, "none"},
                           Rule{"--main-grads", precision.main_grads, trained, "none"},
                           Rule{"--grad-comm", precision.grad_comm, sums, "none"},
                           Rule{"--moments", o.moments.first, moments, nullptr},
                           Rule{"--moments", o.moments.second, moments, nullptr}}) {
    if (!rule.value) continue;
    std::vector<std::string> names;
    for (const DType dtype : rule.allowed) names.emplace_back(name_of(dtype));
    if (rule.other != nullptr) names.emplace_back(rule.other);
    const bool is_allowed =
        std::find(rule.allowed.begin(), rule.allowed.end(), *rule.value) != rule.allowed.end();
    if (!is_allowed)
      throw UsageError(concat(rule.option, " is ", name_of(*rule.value),
                              ", which cannot be trained with; use ", join(names, ", ")));
  }
}

// Plans may leave moments out; here the optimizer says which there are.
void check_moments(const TrainOptions& o) {
  if (o.moments.first && o.moments.second) return;
  throw UsageError(concat("--moments is ", to_text(o.moments),
                          ", and none is for fsdp plan; give a type such as bf16, or use "
                          "--optimizer sgd, which has no second moment"));
}

void check_muon(const TrainOptions& o) {
  if (o.optimizer != OptimizerChoice::kMuon) {
    if (o.shard.matrices.except.empty()) return;
    throw UsageError("--muon-except needs --optimizer muon; drop it");
  }
  if (o.muon_momentum() <= 0 || o.muon_momentum() >= 1)
    throw UsageError(concat("--momentum is ", o.muon_momentum(),
                            "; Muon needs a number above 0 and below 1, such as 0.95"));
  if (o.tp > 1)
    throw UsageError(concat("--optimizer is muon, which updates whole matrices, but --tp is ", o.tp,
                            ", whose ranks share them out; drop one of the two"));
  if (o.shard.offload.fraction > 0)
    throw UsageError(concat("--optimizer is muon, which updates whole matrices, but --offload is ",
                            o.shard.offload.fraction,
                            ", which cuts shards anywhere; drop one of the two"));
}

void check_checkpoints(const TrainOptions& o) {
  validate(o.saving.keep);
  if (o.resume.empty())
    throw UsageError("--resume is empty; use auto, never or the path of a checkpoint");
  if (!o.patches.empty() && o.shard.quantization.recipe != WeightRecipe::kPlain)
    throw UsageError(concat("--patches is '", o.patches, "', but --weights is ",
                            row_of(o.shard.quantization.recipe).name,
                            ", whose codes no receiver knows; leave one of the two out"));
  if (!o.init.empty() && o.resume != "auto" && o.resume != "never")
    throw UsageError(concat("--init is '", o.init, "' and --resume is '", o.resume,
                            "'; a run begins with one of them"));
  if (o.export_dir.empty() && o.export_every > 0)
    throw UsageError(concat("--export-every is ", o.export_every,
                            ", but there is no --export-dir to write to; give one"));
}

// A graph is replayed without the host, so it cannot hold steps in which the host takes part.
void check_graph(const TrainOptions& o) {
  if (!o.cuda_graph) return;
  if (!o.trace.empty())
    throw UsageError(concat("--trace is '", o.trace,
                            "', but a step that --cuda-graph replays has no spans to trace; drop "
                            "one of them"));
  if (o.device == DeviceChoice::kCpu)
    throw UsageError(
        "--cuda-graph records what a GPU does, but --device is cpu; drop one of the two");
  if (o.ranks > 1)
    throw UsageError(concat("--cuda-graph records one rank of a process, but --ranks is ", o.ranks,
                            "; start ", o.ranks, " processes, e.g. with mpirun -n ", o.ranks));
  if (o.shard.offload.fraction > 0)
    throw UsageError(concat("--cuda-graph cannot record updates on the host, but --offload is ",
                            o.shard.offload.fraction, "; drop one of the two"));
  if (o.shard.report_nan != ReportNan::kOff)
    throw UsageError(
        "--cuda-graph cannot record --name-nan, which waits for every gradient; drop one of the "
        "two");
  if (o.shard.pool == PoolKind::kOnDemand)
    throw UsageError(
        "--cuda-graph needs memory that stays where it is, but --pool is on_demand; use planned, "
        "max_pool or double_buffer");
}

void check_user_buffers(const TrainOptions& o) {
  if (o.shard.user_buffers == UserBuffers::kOff) return;
  if (o.device == DeviceChoice::kCpu || o.ranks > 1)
    throw UsageError(concat("--user-buffers is ", name_of(o.shard.user_buffers),
                            ", which NCCL between processes on GPUs alone uses; set it to off, or "
                            "start the processes with mpirun, srun or torchrun"));
}

}  // namespace

void read_text(const std::string& option, const std::string& text, StepRange& value) {
  const auto whole = [&](std::string_view digits) {
    int64_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    const bool is_number = error == std::errc() && end == digits.data() + digits.size();
    if (!is_number || number < 1)
      refuse_option(option, text,
                    "it must be a range of steps: two numbers from 1 on, the lower one first, e.g. "
                    "3-5");
    return number;
  };
  const std::string_view words = text;
  const size_t dash = words.find('-');
  value = {whole(words.substr(0, dash)),
           whole(dash == words.npos ? words : words.substr(dash + 1))};
  if (value.last < value.first) whole("");
  constexpr int64_t kMaxTraced = 1000;  // some hundred megabytes, of a small model
  if (value.last - value.first >= kMaxTraced)
    refuse_option(
        option, text,
        concat("more than ", kMaxTraced, " steps make a trace that no viewer opens; give fewer"));
}

std::string to_text(const StepRange& range) {
  return range.first == range.last ? concat(range.first) : concat(range.first, "-", range.last);
}

std::string to_text(const MomentTypes& moments) {
  const std::string first = option_texts(moments.first).front();
  const std::string second = option_texts(moments.second).front();
  return first == second ? first : concat(first, "/", second);
}

void read_text(const std::string& option, const std::string& text, MomentTypes& value) {
  const size_t slash = text.find('/');
  value.first = parse_dtype_or(option, text.substr(0, slash), "none");
  value.second = slash == std::string::npos
                     ? value.first
                     : parse_dtype_or(option, text.substr(slash + 1), "none");
}

void TrainOptions::validate(int64_t num_ranks) const {
  if (data.empty())
    throw UsageError(
        "--data is missing; give text files, directories or token files, e.g. "
        "--data docs");
  if (!data_weights.empty() && data_weights.size() != data.size())
    throw UsageError(concat("--data-weights has ",
                            counted_text(static_cast<int64_t>(data_weights.size()), "number"),
                            " for ", counted_text(static_cast<int64_t>(data.size()), "path"),
                            " of --data; give one for each, in their order"));
  if (!data_weights.empty()) static_cast<void>(source_shares(data_weights));
  check_division(*this, num_ranks);
  check_length(*this);
  if (epochs == 0) check_rate(*this);  // plan_run() does so when it knows the steps
  check_checkpoints(*this);
  if (beta1 >= 1 || beta2 >= 1)
    throw UsageError(
        concat("--beta1 is ", beta1, " and --beta2 is ", beta2, "; both must be below 1"));
  const bool is_dynamic = step.loss_scale.growth != 1.0;
  if (is_dynamic && step.on_nonfinite == OnNonfinite::kUpdate)
    throw UsageError(
        "--loss-scale is dynamic, but --on-nonfinite is update; a dynamic scale skips "
        "steps that overflow, so use --on-nonfinite skip");
  check_moments(*this);
  check_types(*this);
  check_graph(*this);
  check_user_buffers(*this);
  if (log == kWandb)
    throw UsageError("--log is 'wandb:'; name a project, e.g. --log wandb:rank-tests");
  if (nesterov && (optimizer != OptimizerChoice::kSgd || sgd_momentum() == 0))
    throw UsageError("--nesterov needs --optimizer sgd with a --momentum above 0; drop it");
  check_adapters();
  check_muon(*this);
  if (shard.pool_budget_bytes != 0 && shard.prefetch != ShardOptions{}.prefetch)
    throw UsageError(concat("--prefetch is ", shard.prefetch,
                            ", but --pool-budget chooses the depth itself; drop one of the two"));
  shard.validate();
}

void TrainOptions::check_adapters() const {
  const LoraOptions& lora = build.lora;
  if (!lora.is_on()) {
    if (lora.alpha || !lora.on.empty())
      throw UsageError(concat(lora.alpha ? "--lora-alpha" : "--lora-on",
                              " is given without --lora; give the rank of the adapters, too, e.g. "
                              "--lora 16"));
    return;
  }
  const auto refuse = [&](const std::string& other, const char* why) {
    throw UsageError(
        concat("--lora is ", lora.rank, ", but ", other, ", ", why, "; drop one of the two"));
  };
  if (tp > 1) refuse(concat("--tp is ", tp), "whose ranks do not share out adapters");
  if (optimizer == OptimizerChoice::kMuon)
    refuse("--optimizer is muon", "which is for the matrices that --lora freezes");
  if (!patches.empty())
    refuse(concat("--patches is '", patches, "'"), "which is of weights that --lora freezes");
  if (!export_dir.empty())
    refuse(concat("--export-dir is '", export_dir, "'"),
           "which is of whole weights; fsdp convert writes adapters (--to peft) and merged weights "
           "(--to hf --merge)");
}

int64_t TrainOptions::rows_of_rank(int64_t num_ranks) const {
  const int64_t parts = checked_mul(data_parallel_size(num_ranks), microbatches);
  if (batch % parts != 0)
    throw UsageError(concat(
        "--batch is ", batch, ", which ",
        counted_text(data_parallel_size(num_ranks), tp == 1 ? "rank" : "tp group"), " with ",
        microbatches, microbatches == 1 ? " microbatch" : " microbatches",
        " cannot share evenly; give a multiple of ", parts, ", e.g. ", round_up(batch, parts)));
  return batch / parts;
}

int64_t TrainOptions::total_steps() const {
  return tokens == 0 ? steps : ceil_div(tokens, tokens_per_step());
}

int64_t TrainOptions::validation_steps() const {
  return validate_every.value_or(std::min<int64_t>(ceil_div(total_steps(), 10), 1000));
}

LearningRateOptions TrainOptions::rate_options() const {
  return {.schedule = schedule,
          .rate = rate(),
          .floor = schedule == RateSchedule::kConstant ? 0.0 : min_lr.value_or(rate() / 10),
          .warmup_steps = warmup.value_or(std::min<int64_t>(total_steps() / 10, 1000)),
          .total_steps = total_steps(),
          .decay_steps = decay_steps,
          .decay = decay};
}

TrainOptions TrainOptions::resolved(int64_t num_ranks, const RankDevice& found) const {
  TrainOptions result = *this;
  result.ranks = num_ranks;
  result.compute = found.compute;
  result.device = found.device;
  result.peak_tflops = peak_tflops.value_or(found.peak_tflops);
  result.steps = total_steps();
  result.sequence = sequence_length();
  result.lr = rate();
  result.validate_every = validation_steps();
  const LearningRateOptions rate = rate_options();
  result.warmup = rate.warmup_steps;
  // Rounds the quotient to the digits that a person would write.
  result.min_lr = min_lr ? *min_lr : std::stod(concat(rate.floor));
  result.log = log_path().empty() ? "none" : log_path();
  result.report = report_path().empty() ? "none" : report_path();
  return result;
}

namespace {

std::string path_of(const std::string& choice, const std::string& directory, const char* name) {
  if (choice == "none") return "";
  if (choice != "auto" && !choice.starts_with(kWandb)) return choice;
  return directory.empty() ? "" : concat(directory, "/", name);
}

}  // namespace

std::string TrainOptions::log_path() const { return path_of(log, checkpoint_dir, "log.jsonl"); }

std::string TrainOptions::wandb_project() const {
  return log.starts_with(kWandb) ? log.substr(kWandb.size()) : "";
}

std::string TrainOptions::report_path() const {
  return path_of(report, checkpoint_dir, "report.html");
}

}  // namespace fsdp::train
