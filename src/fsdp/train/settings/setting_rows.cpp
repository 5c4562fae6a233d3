#include "fsdp/train/settings/setting_values.h"

#include <limits>

#include "fsdp/base/check.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp::train {

namespace {

constexpr int64_t kMany = int64_t{1} << 40;
constexpr double kInfinite = std::numeric_limits<double>::max();

template <typename Value>
std::vector<std::string> names_of(std::span<const Value> values) {
  std::vector<std::string> names;
  for (const Value value : values) names.emplace_back(name_of(value));
  return names;
}

// For a type with its own parser, which does not know the option's name.
template <typename Value>
SettingValue parsed_value(Value TrainOptions::*field, Value (*parse)(std::string_view)) {
  return one_value(
      SettingKind::kText, [field](const TrainOptions& o) { return to_text(o.*field); },
      [field, parse](TrainOptions& o, const std::string& option, const std::string& value) {
        try {
          o.*field = parse(value);
        } catch (const UsageError& error) {
          throw UsageError(concat(option, ": ", error.what()));
        }
      });
}

std::string moment_text(const std::optional<DType>& moment) {
  return moment ? std::string(name_of(*moment)) : "none";
}

SettingValue moments_value() {
  return one_value(
      SettingKind::kText,
      [](const TrainOptions& o) {
        return o.precision.first_moment == o.precision.second_moment
                   ? moment_text(o.precision.first_moment)
                   : "as below";
      },
      [](TrainOptions& o, const std::string& option, const std::string& value) {
        // --print-config writes this where the two dtypes differ; the rows below give both.
        if (value == "as below") return;
        o.precision.first_moment = o.precision.second_moment = parse_dtype_or_none(option, value);
      });
}

SettingValue moment_value(std::optional<DType> PrecisionTypes::*field) {
  return one_value(
      SettingKind::kText,
      [field](const TrainOptions& o) { return moment_text(o.precision.*field); },
      [field](TrainOptions& o, const std::string& option, const std::string& value) {
        o.precision.*field = parse_dtype_or_none(option, value);
      });
}

SettingValue loss_scale_value() {
  return one_value(
      SettingKind::kText,
      [](const TrainOptions& o) {
        return o.dynamic_loss_scale ? concat("dynamic:", number_text(o.loss_scale))
                                    : number_text(o.loss_scale);
      },
      [](TrainOptions& o, const std::string& option, const std::string& value) {
        const std::string dynamic = "dynamic";
        o.dynamic_loss_scale = value.starts_with(dynamic);
        if (value == dynamic) {
          o.loss_scale = 65536.0;
          return;
        }
        const std::string number =
            value.starts_with(dynamic + ":") ? value.substr(dynamic.size() + 1) : value;
        try {
          o.loss_scale = parse_number(option, number, 0x1p-24, 0x1p24);
        } catch (const UsageError&) {
          refuse_option(option, value,
                        "it must be a number from 2^-24 to 2^24, dynamic, or dynamic:START");
        }
      });
}

// "PATTERN decay=0.1 rate=0.5": either or both.
ParameterRule parse_rule(const std::string& option, const std::string& value) {
  constexpr const char* kForm =
      "a rule is PATTERN decay=X rate=Y (either or both), e.g. "
      "'*.bias decay=0'";
  std::istringstream words(value);
  ParameterRule rule;
  std::string word;
  if (!(words >> rule.pattern)) refuse_option(option, value, kForm);
  bool says_something = false;
  while (words >> word) {
    const size_t equals = word.find('=');
    const std::string field = word.substr(0, equals);
    if (equals == std::string::npos || (field != "decay" && field != "rate"))
      refuse_option(option, value, kForm);
    const double number = parse_number(concat(option, " ", field), word.substr(equals + 1), 0, 1e6);
    if (field == "decay")
      rule.weight_decay = number;
    else
      rule.rate_scale = number;
    says_something = true;
  }
  if (!says_something) refuse_option(option, value, kForm);
  return rule;
}

std::string rule_text(const ParameterRule& rule) {
  std::string text = rule.pattern;
  if (rule.weight_decay) text += concat(" decay=", number_text(*rule.weight_decay));
  if (rule.rate_scale != 1.0 || !rule.weight_decay)
    text += concat(" rate=", number_text(rule.rate_scale));
  return text;
}

SettingValue rules_value() {
  return {SettingKind::kList,
          [](const TrainOptions& o) {
            std::vector<std::string> texts;
            for (const ParameterRule& rule : o.rules) texts.push_back(rule_text(rule));
            return texts;
          },
          [](TrainOptions& o, const std::string& option, const std::vector<std::string>& values) {
            o.rules.clear();
            for (const std::string& value : values) o.rules.push_back(parse_rule(option, value));
          }};
}

SettingValue data_weights_value() {
  return {SettingKind::kList,
          [](const TrainOptions& o) {
            std::vector<std::string> texts;
            for (const double weight : o.data_weights) texts.push_back(number_text(weight));
            return texts;
          },
          [](TrainOptions& o, const std::string& option, const std::vector<std::string>& values) {
            o.data_weights.clear();
            for (const std::string& value : values)
              o.data_weights.push_back(parse_number(option, value, 0x1p-40, 0x1p40));
          }};
}

std::vector<std::string> weight_recipe_names() {
  std::vector<std::string> names;
  for (const WeightRecipeRow& row : all_weight_recipes()) names.emplace_back(row.name);
  return names;
}

class Rows {
 public:
  void group(const char* name) { group_ = name; }
  void add(const char* name, const char* type, SettingValue value, const char* help) {
    rows_.push_back(
        {group_, name, type, help, value.kind, std::move(value.read), std::move(value.write)});
  }
  std::vector<Setting> take() && { return std::move(rows_); }

 private:
  const char* group_ = "";
  std::vector<Setting> rows_;
};

using O = TrainOptions;

void add_model(Rows& rows) {
  rows.group("model");
  rows.add("model", "NAME|PATH", text_value(&O::model),
           "A preset (tiny, moe-tiny, hybrid-tiny, hybrid-moe-tiny, delta-tiny, mla-tiny, "
           "llama-110m, llama-1b), a config.json, or a directory with one");
  rows.add("init", "PATH", text_value(&O::init),
           "Weights to begin with: a checkpoint, a run, or safetensors files of other tools; those "
           "beside --model's config.json, if it is a directory that has some");
  rows.add("from-scratch", "BOOL", flag_value(&O::from_scratch),
           "Begin with random weights, though --model's directory has some");
  rows.add(
      "vocabulary", "N|auto", whole_or_auto(&O::vocabulary, 1, kMaxDim),
      "Tokens that the model knows (vocab_size); auto: as the model says, and of a preset as many "
      "as the data has, if those are more");
  rows.add("compute", "DTYPE", dtype_value(&O::compute, "auto"),
           "Of weights and activations; auto: fp32 on CPUs, bf16 on GPUs");
  rows.add("weights", "RECIPE", choice_value(&O::weights, weight_recipe_names()),
           "How matrices of linear layers and experts are gathered and multiplied: bf16 (as "
           "--compute says), fp8-row, fp8-tensor or fp8-block; mxfp8 and nvfp4 are gathered so, "
           "and multiplied as --compute says");
  rows.add("weights-except", "GLOB...", list_value(&O::weights_except),
           "Parameters that stay as --compute says, by name: 'model.layers.0.*'");
  rows.add("weights-scaling", "HOW", choice_value(&O::weights_scaling, {"current", "delayed"}),
           "Where shared scales of --weights come from: the numbers, or those of the last 16 "
           "updates");
  rows.add("weights-gradient", "HOW", choice_value(&O::weights_gradient, {"quantized", "plain"}),
           "How gradients of --weights are multiplied: quantized, or as --compute says");
  rows.add("recompute", "WHAT", choice_value(&O::recompute, {"none", "block"}),
           "Forget a block's activations and compute them again in the backward");
  rows.add("logit-memory", "BYTES", bytes_value(&O::logit_bytes),
           "The loss has the logits of so many tokens at once as fit into this, at least of one");
}

void add_data(Rows& rows) {
  rows.group("data");
  rows.add(
      "data", "PATH...", list_value(&O::data),
      "Text files, JSON lines, parquet files, directories, or token files of `fsdp data pack`");
  rows.add("data-weights", "X...", data_weights_value(),
           "Proportions in which sequences are drawn from the paths of --data, a number for each; "
           "none: all of --data as one text, once per epoch");
  rows.add(
      "tokenizer", "PATH|bytes", text_value(&O::tokenizer),
      "Of text: a tokenizer.json or a directory with one; auto: that of the model's directory, "
      "or bytes");
  rows.add("field", "NAME", text_value(&O::field),
           "Rows of JSON lines or parquet have their text in this field; none: text, prompt and "
           "completion, or messages");
  rows.add("validation-data", "PATH...", list_value(&O::validation_data),
           "The same, to validate on; none: the end of --data");
  rows.add("validation-fraction", "X", number_value(&O::validation_fraction, 0, 0.5),
           "How much of --data is kept for validation");
  rows.add("documents", "HOW", choice_value(&O::documents, {"auto", "joined", "separate"}),
           "Whether tokens see the documents before their own in a sequence; auto: joined, and "
           "separate for data with loss masks");
  rows.add("sequence", "N", whole_value(&O::sequence, 1, 1 << 24), "Tokens per sequence");
  rows.add("batch", "N", whole_value(&O::batch, 1, 1 << 30),
           "Sequences per step, of all ranks and microbatches together");
  rows.add("microbatches", "N", whole_value(&O::microbatches, 1, 1 << 20),
           "Parts that each rank computes one after the other");
  rows.add("validate-every", "N", whole_value(&O::validate_every, 0, kMany),
           "Steps between validations; 0: none");
  rows.add("validation-batches", "N", whole_value(&O::validation_batches, 1, kMany),
           "Batches of one validation");
  rows.group("length");
  rows.add("steps", "N", whole_value(&O::steps, 1, kMany), "Optimizer steps in all");
  rows.add("tokens", "N", whole_value(&O::tokens, 0, int64_t{1} << 60),
           "Tokens in all, in place of --steps; 0: as --steps says");
  rows.add("epochs", "X", number_value(&O::epochs, 0, 1e9),
           "Times that --data is gone through, in place of --steps and --tokens; 0: as they say");
}

void add_optimizer(Rows& rows) {
  rows.group("optimizer");
  rows.add("optimizer", "NAME", choice_value(&O::optimizer, {"adamw", "sgd", "muon"}),
           "What updates; muon: the matrices of hidden layers, and AdamW the rest");
  rows.add("lr", "X", number_value(&O::lr, 0, 1e6), "The highest learning rate");
  rows.add("schedule", "NAME", choice_value(&O::schedule, names_of(all_rate_schedules())),
           "How the rate goes on after the warm-up: constant, linear, cosine or wsd");
  rows.add("warmup", "N|auto", whole_or_auto(&O::warmup, 0, kMany),
           "Steps in which the rate rises; auto: a tenth of all, at most 1000");
  rows.add("min-lr", "X|auto", number_or_auto(&O::min_lr, 0, 1e6),
           "What the rate falls to; auto: a tenth of --lr");
  rows.add("decay-steps", "N", whole_value(&O::decay_steps, 0, kMany),
           "wsd: how many of the last steps decay");
  rows.add("decay", "NAME", choice_value(&O::decay, names_of(all_rate_decays())),
           "wsd: linear or 1-sqrt");
  rows.add("beta1", "X", number_value(&O::beta1, 0, 1), "AdamW: kept of the first moment");
  rows.add("beta2", "X", number_value(&O::beta2, 0, 1), "AdamW: kept of the second moment");
  rows.add("eps", "X", number_value(&O::eps, 0, 1), "AdamW: added to the root");
  rows.add("weight-decay", "X", number_value(&O::weight_decay, 0, 1e6), "Weight decay");
  rows.add("decay-vectors", "BOOL", flag_value(&O::decay_vectors), "Decay biases and norms, too");
  rows.add("rule", "RULE...", rules_value(),
           "Decay and rate of parameters by name: 'PATTERN decay=X rate=Y'; the first that "
           "matches counts");
  rows.add("momentum", "X", number_value(&O::momentum, 0, 1), "SGD: kept of the last direction");
  rows.add("nesterov", "BOOL", flag_value(&O::nesterov), "SGD: look ahead");
  rows.add("muon-momentum", "X", number_value(&O::muon_momentum, 0, 1),
           "Muon: kept of the last direction");
  rows.add(
      "muon-scale", "NAME", choice_value(&O::muon_scale, {"match-adamw", "original"}),
      "Muon: how far a matrix moves at a rate: as far as AdamW's steps typically do, or as its "
      "authors let it");
  rows.add("muon-except", "NAMES...", list_value(&O::muon_except),
           "Muon: matrices that AdamW updates, by name: 'model.layers.0.*'");
  rows.add("adamw-rate", "X", number_value(&O::adamw_rate, 0, 1e6),
           "Muon: the learning rate of what AdamW updates, relative to --lr");
  rows.add("clip", "X", number_value(&O::clip, 0, kInfinite),
           "Gradients are clipped to this norm; 0: not");
  rows.add("on-nonfinite", "WHAT", choice_value(&O::on_nonfinite, {"update", "skip"}),
           "What a step with NaN or Inf gradients does");
  rows.add("loss-scale", "X|dynamic", loss_scale_value(),
           "Losses are multiplied by it, for fp16 gradients");
  rows.add("updates", "WHEN", choice_value(&O::updates, {"hidden", "blocking"}),
           "Beside the next forward, or before it");
  rows.add("rounding", "HOW", choice_value(&O::rounding, {"nearest", "stochastic"}),
           "Of narrow weights without main weights");
}

void add_sharding(Rows& rows) {
  rows.group("sharding");
  rows.add("ranks", "N", whole_value(&O::ranks, 0, 4096),
           "Ranks as threads of this process; 0: one, or those that mpirun, srun or torchrun "
           "started");
  rows.add("outer", "N", whole_value(&O::outer, 1, 1 << 20),
           "Ranks along the outer axis (HSDP, HFSDP); divides all ranks");
  rows.add("ep", "N", whole_value(&O::ep, 1, 1 << 20),
           "Ranks that share out the experts of a layer: each has its own, and tokens travel");
  rows.add("tp", "N", whole_value(&O::tp, 1, 1 << 20),
           "Ranks that compute the same sequences together: each has slices of the matrices, and a "
           "part of the tokens between them");
  rows.add("expert-capacity", "X", number_value(&O::expert_capacity, 0.0, 4096.0),
           "With --ep: each expert has room for X times the tokens of an even load, and what is "
           "beyond is dropped; 0: for all that could come");
  rows.add("strategy", "NAME", parsed_value(&O::strategy, parse_strategy),
           "What is sharded: no_shard, optim, optim_grads, optim_grads_params, the last three "
           "also with +hfsdp, or placements such as RS/PS/SS");
  rows.add("main-params", "DTYPE",
           dtype_value([](auto& o) -> auto& { return o.precision.main_params; }),
           "Main weights; none: the optimizer updates the weights themselves");
  rows.add("main-storage", "HOW",
           one_value(
               SettingKind::kText,
               [](const TrainOptions& o) { return std::string(name_of(o.precision.main_storage)); },
               [](TrainOptions& o, const std::string& option, const std::string& value) {
                 const std::vector<std::string> names = names_of(all_main_storages());
                 o.precision.main_storage = all_main_storages()[parse_choice(option, value, names)];
               }),
           "fp32 main weights of bf16 weights: separate or split");
  rows.add("main-grads", "DTYPE",
           dtype_value([](auto& o) -> auto& { return o.precision.main_grads; }),
           "What microbatches add up in; none: as the weights");
  rows.add("grad-comm", "DTYPE",
           dtype_value([](auto& o) -> auto& { return o.precision.grad_comm; }),
           "What gradients travel in; none: as the main gradients");
  rows.add("moments", "DTYPE", moments_value(), "Both of the optimizer's moments");
  rows.add("first-moment", "DTYPE", moment_value(&PrecisionTypes::first_moment),
           "Where it differs from --moments");
  rows.add("second-moment", "DTYPE", moment_value(&PrecisionTypes::second_moment),
           "Where it differs from --moments");
  rows.add("pool", "KIND", choice_value(&O::pool, names_of(all_pool_kinds())),
           "Memory of gathered weights and unreduced gradients: on_demand, double_buffer, "
           "max_pool or planned");
  rows.add("prefetch", "N", whole_value(&O::prefetch, 0, 4096),
           "Units gathered ahead of the one that computes");
  rows.add("pool-budget", "BYTES", bytes_value(&O::pool_budget_bytes),
           "Gather as far ahead as the pool can within this much memory; none: as --prefetch says");
  rows.add("on-move", "WHAT", choice_value(&O::on_move, {"follow", "refuse"}),
           "A unit's fixed slot is taken because the order changed");
  rows.add("other-units", "WHAT", choice_value(&O::other_units, {"on_demand", "persistent"}),
           "double_buffer: memory of units unlike the most common one");
  rows.add("user-buffers", "HOW",
           choice_value(&O::user_buffers, {"off", "registered", "symmetric"}),
           "Whether NCCL uses the memory that collectives touch in place");
  rows.add("gradient-lifetime", "HOW", choice_value(&O::gradient_lifetime, {"persistent", "step"}),
           "Whether main gradients keep their memory between steps");
  rows.add("granularity", "WHERE", parsed_value(&O::granularity, parse_granularity),
           "Where a shard may end: element, row, block(N) or tensor");
  rows.add("offload", "FRACTION", number_value(&O::offload, 0, 1),
           "How much of the optimizer's state is in the host's memory");
  rows.add("offload-pin", "BOOL", flag_value(&O::offload_pin), "In page-locked memory");
  rows.add("offload-overlap", "BOOL", flag_value(&O::offload_overlap),
           "Chunks travel while others are updated");
  rows.add("offload-chunk", "N", whole_value(&O::offload_chunk, 1, 1 << 30),
           "Elements that travel together");
}

void add_machine(Rows& rows) {
  rows.group("machine");
  rows.add("device", "NAME", choice_value(&O::device, {"auto", "cpu", "cuda"}),
           "Where to compute; auto: a GPU where there is one");
  rows.add("cuda-graph", "BOOL", flag_value(&O::cuda_graph),
           "Record a step once and replay it as one launch");
  rows.add("threads", "N", whole_value(&O::threads, 0, 4096),
           "Computing threads of each rank; 0: the cores, shared evenly");
  rows.add("checked", "BOOL", flag_value(&O::checked),
           "Ranks compare what they are about to do; parameters that are not there read NaN");
  rows.add("name-nan", "BOOL", flag_value(&O::name_nan),
           "Search every gradient for NaN and Inf, and name the parameter");
  rows.add("timeout", "SECONDS", number_value(&O::timeout, 0.001, 1e9),
           "How long any wait for other ranks may take");
  rows.add("seed", "N", whole_value(&O::seed, 0, std::numeric_limits<int64_t>::max()),
           "Of initial weights, shuffling, rounding and sampling");
  rows.add("deterministic", "BOOL", flag_value(&O::deterministic),
           "Refuse operations whose result may differ from run to run");
}

void add_checkpoints(Rows& rows) {
  rows.group("checkpoints");
  rows.add("checkpoint-dir", "DIR", text_value(&O::checkpoint_dir),
           "Where the run's checkpoints are; none without it");
  rows.add("checkpoint-every", "N", whole_value(&O::checkpoint_every, 0, kMany),
           "Steps between checkpoints; 0: only at the end");
  rows.add("keep-last", "N", whole_value(&O::keep_last, 0, kMany),
           "How many of the newest stay; 0: all");
  rows.add("keep-every", "N", whole_value(&O::keep_every, 0, kMany),
           "Multiples of this stay for ever; 0: none");
  rows.add("save", "HOW", choice_value(&O::save, {"background", "blocking"}),
           "Beside the training, or before it goes on");
  rows.add("checkpoint-dtype", "DTYPE", dtype_value(&O::checkpoint_dtype, "exact"),
           "Of the stored weights; exact: what the optimizer updates");
  rows.add("write-chunk", "BYTES", bytes_value(&O::write_chunk_bytes),
           "Memory beside the state while saving");
  rows.add("load-chunk", "BYTES", bytes_value(&O::load_chunk_bytes),
           "Memory beside the state while loading");
  rows.add("read-threads", "N", whole_value(&O::read_threads, 0, 256),
           "Of each rank while loading; 0: two");
  rows.add("resume", "auto|never|PATH", text_value(&O::resume),
           "auto: go on with the latest checkpoint of --checkpoint-dir, if there is one");
  rows.add("restart-data", "BOOL", flag_value(&O::restart_data),
           "Resume, but begin the data anew: for other data, another --sequence or --seed");
  rows.add("allow-missing", "PATTERN...", list_value(&O::allow_missing),
           "Tensors that what is loaded may lack; they keep their initial values");
  rows.add("allow-extra", "BOOL", flag_value(&O::allow_extra),
           "What is loaded may have tensors that the model does not have");
  rows.add("export-dir", "DIR", text_value(&O::export_dir),
           "Where whole weights are written in HuggingFace's form, as they compute; none without "
           "it");
  rows.add("export-every", "N", whole_value(&O::export_every, 0, kMany),
           "Steps between exports, each in a directory of its own; 0: only at the end");
  rows.add("patches", "DIR", text_value(&O::patches),
           "Write what changes in the weights here, for receivers (docs/weights-out.md)");
  rows.add("patch-every", "N", whole_value(&O::patch_every, 1, kMany), "Steps between patches");
  rows.add("patch-names", "NAMES", choice_value(&O::patch_names, {"hf", "vllm"}),
           "Of tensors in patches: as published, or fused as vLLM has them");
  rows.add("keep-patches", "N", whole_value(&O::keep_patches, 0, kMany),
           "Patches between full ones; what is older than two full ones is removed. 0: keeps all");
}

void add_output(Rows& rows) {
  rows.group("output");
  rows.add("log", "FILE", text_value(&O::log),
           "JSON lines, one per step; auto: log.jsonl in --checkpoint-dir; none");
  rows.add("tensorboard", "DIR", text_value(&O::tensorboard), "TensorBoard event files");
  rows.add(
      "report", "FILE", text_value(&O::report),
      "A page with curves, memory and a timeline; auto: report.html in --checkpoint-dir; none");
  rows.add("trace", "FILE", text_value(&O::trace),
           "Spans of some steps, of all ranks, for Perfetto or chrome://tracing");
  rows.add("trace-steps", "FIRST-LAST", parsed_value(&O::trace_steps, parse_step_range),
           "Which steps, counted from the start of this process");
  rows.add("log-every", "N", whole_value(&O::log_every, 0, kMany),
           "Steps between lines; 0: every step of a short run, else now and then");
  rows.add("sample", "TEXT", text_value(&O::sample),
           "What the sample of generated text at the end begins with; '': no sample");
  rows.add("sample-tokens", "N", whole_value(&O::sample_tokens, 1, 1 << 20), "Its length");
  rows.add("peak-tflops", "X|auto", number_or_auto(&O::peak_tflops, 0, 1e9),
           "What one rank's device can compute at most, for MFU; auto: of known GPUs, by name; 0: "
           "not shown");
  rows.add("quiet", "BOOL", flag_value(&O::quiet), "Print nothing but errors");
}

}  // namespace

std::vector<Setting> make_setting_rows() {
  Rows rows;
  add_model(rows);
  add_data(rows);
  add_optimizer(rows);
  add_sharding(rows);
  add_machine(rows);
  add_checkpoints(rows);
  add_output(rows);
  return std::move(rows).take();
}

}  // namespace fsdp::train
