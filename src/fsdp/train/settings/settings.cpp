#include "fsdp/train/settings/settings.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "fsdp/base/check.h"
#include "fsdp/base/foreign_words.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/optim/option_fields.h"
#include "fsdp/shard/option_fields.h"

namespace fsdp::train {

namespace {

// --- the list ------------------------------------------------------------------------------------

constexpr double kMany = 0x1p40;
constexpr double kLargestWhole = 0x1p63;
constexpr const char* kAuto = "auto";

// Settings of a group, of fields that are in no list of their own.
template <typename Visit>
struct Rows {
  const Visit& visit;
  const char* group;

  template <typename Value>
  void operator()(Value& value, const char* name, std::string_view type, const char* help,
                  double minimum = 0, double maximum = 0, const char* absent = "none") const {
    visit(OptionField{}, value, OptionFlag{group, name, type, help, minimum, maximum, absent});
  }
};

template <typename Visit>
void visit_model(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "model"};
  row(o.model, "model", "NAME|PATH",
      "A preset (tiny, moe-tiny, hybrid-tiny, hybrid-moe-tiny, delta-tiny, mla-tiny, llama-110m, "
      "llama-1b), a config.json, or a directory with one");
  row(o.init, "init", "PATH|none",
      "Weights to begin with: a checkpoint, a run, or safetensors files of other tools; those "
      "beside --model's config.json, if it is a directory that has some; none: random ones");
  row(o.vocabulary, "vocabulary", "N|auto",
      "Tokens that the model knows (vocab_size); auto: as the model says, and of a preset as many "
      "as the data has, if those are more",
      1, kMaxDim, kAuto);
  row(o.compute, "compute", "DTYPE", "Of weights and activations; auto: fp32 on CPUs, bf16 on GPUs",
      0, 0, kAuto);
  row(o.build.recompute, "recompute", "WHAT",
      "Forget a block's activations and compute them again in the backward");
  row(o.build.logit_bytes, "logit-memory", kBytesType,
      "The loss has the logits of so many tokens at once as fit into this, at least of one", 1);
  const Rows<Visit> adapters{visit, "adapters"};
  adapters(o.build.lora.rank, "lora", "RANK",
           "Train adapters of this rank on frozen weights (LoRA); 0: train the weights themselves",
           0, 0x1p20);
  adapters(o.build.lora.alpha, "lora-alpha", "X|auto",
           "An adapter adds alpha / rank times what it computes; auto: 2 * rank", 0x1p-40, 0x1p40,
           kAuto);
  adapters(o.build.lora.on, "lora-on", "GLOB...",
           "Linear layers of blocks that have adapters, by name ('*.self_attn.*') or its last word "
           "(q_proj v_proj); none: all of them");
}

template <typename Visit>
void visit_data(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "data"};
  row(o.data, "data", "PATH...",
      "Text files, JSON lines, parquet files, directories, or token files of `fsdp data pack`");
  row(o.data_weights, "data-weights", "X...",
      "Proportions in which sequences are drawn from the paths of --data, a number for each; none: "
      "all of --data as one text, once per epoch",
      0x1p-40, 0x1p40);
  row(o.tokenizer, "tokenizer", "PATH|bytes",
      "Of text: a tokenizer.json or a directory with one; auto: that of the model's directory, or "
      "bytes");
  row(o.field, "field", "NAME",
      "Rows of JSON lines or parquet have their text in this field; none: text, prompt and "
      "completion, or messages");
  row(o.validation_data, "validation-data", "PATH...",
      "The same, to validate on; none: the end of --data");
  row(o.validation_fraction, "validation-fraction", "X",
      "How much of --data is kept for validation", 0, 0.5);
  row(o.documents, "documents", "HOW",
      "Whether tokens see the documents before their own in a sequence, or documents are whole in "
      "one; auto: joined, and for data with loss masks separate, or packed for loaded weights",
      0, 0, kAuto);
  row(o.sequence, "sequence", "N|auto",
      "Tokens per sequence; auto: 128; for loaded weights as long as 99 % of the rows, or up to "
      "1024 of text, and as memory allows",
      1, 0x1p24, kAuto);
  row(o.batch, "batch", "N", "Sequences per step, of all ranks and microbatches together", 1,
      0x1p30);
  row(o.microbatches, "microbatches", "N", "Parts that each rank computes one after the other", 1,
      0x1p20);
  row(o.validate_every, "validate-every", "N|auto",
      "Steps between validations; auto: a tenth of all, at most 1000; 0: none", 0, kMany, kAuto);
  row(o.validation_batches, "validation-batches", "N", "Batches of one validation", 1, kMany);
  const Rows<Visit> length{visit, "length"};
  length(o.steps, "steps", "N", "Optimizer steps in all", 1, kMany);
  length(o.tokens, "tokens", "N", "Tokens in all, in place of --steps; 0: as --steps says", 0,
         0x1p60);
  length(o.epochs, "epochs", "X",
         "Times that --data is gone through, in place of --steps and --tokens; 0: as they say", 0,
         1e9);
}

template <typename Visit>
void visit_optimizer(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "optimizer"};
  row(o.optimizer, "optimizer", "NAME",
      "What updates; muon: the matrices of hidden layers, and AdamW the rest");
  row(o.lr, "lr", "X|auto",
      "The highest learning rate; auto: 4e-3, 2e-5 for loaded weights, 2e-4 for adapters", 0, 1e6,
      kAuto);
  row(o.schedule, "schedule", "NAME",
      "How the rate goes on after the warm-up: constant, linear, cosine or wsd");
  row(o.warmup, "warmup", "N|auto",
      "Steps in which the rate rises; auto: a tenth of all, at most 1000", 0, kMany, kAuto);
  row(o.min_lr, "min-lr", "X|auto", "What the rate falls to; auto: a tenth of --lr", 0, 1e6, kAuto);
  row(o.decay_steps, "decay-steps", "N", "wsd: how many of the last steps decay", 0, kMany);
  row(o.decay, "decay", "NAME", "wsd: linear or 1-sqrt");
  row(o.beta1, "beta1", "X", "AdamW: kept of the first moment", 0, 1);
  row(o.beta2, "beta2", "X", "AdamW: kept of the second moment", 0, 1);
  row(o.eps, "eps", "X", "AdamW: added to the root", 0, 1);
  row(o.weight_decay, "weight-decay", "X", "Weight decay of matrices", 0, 1e6);
  row(o.rules, "rule", "RULE...",
      "Decay and rate of parameters by name: 'PATTERN decay=X rate=Y'; the first that matches "
      "counts");
  row(o.momentum, "momentum", "X|auto", "SGD, Muon: kept of the last direction; auto: 0.9 and 0.95",
      0, 1, kAuto);
  row(o.nesterov, "nesterov", kFlagType, "SGD: look ahead");
  row(o.muon_scale, "muon-scale", "NAME",
      "Muon: how far a matrix moves at a rate: as far as AdamW's steps typically do, or as its "
      "authors let it");
  row(o.adamw_rate, "adamw-rate", "X",
      "Muon: the learning rate of what AdamW updates, relative to --lr", 0, 1e6);
  visit_fields(o.step, visit);
}

template <typename Visit>
void visit_sharding(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "sharding"};
  row(o.ranks, "ranks", "N",
      "Ranks as threads of this process; 0: one, or those that mpirun, srun or torchrun started", 0,
      4096);
  row(o.outer, "outer", "N", "Ranks along the outer axis (HSDP, HFSDP); divides all ranks", 1,
      0x1p20);
  row(o.ep, "ep", "N",
      "Ranks that share out the experts of a layer: each has its own, and tokens travel", 1,
      0x1p20);
  row(o.tp, "tp", "N",
      "Ranks that compute the same sequences together: each has slices of the matrices, and a part "
      "of the tokens between them",
      1, 0x1p20);
  row(o.build.expert_capacity, "expert-capacity", "X",
      "With --ep: each expert has room for X times the tokens of an even load, and what is beyond "
      "is dropped; 0: for all that could come",
      0, 4096);
  row(o.build.expert_exchange, "expert-exchange", "HOW",
      "With --ep: exact sends the rows of tokens alone, for which the host waits once per layer; "
      "padded sends room for all, and never waits; auto: padded on GPUs of one host and with "
      "--cuda-graph, else exact");
  row(o.moments, "moments", "DTYPE",
      "The optimizer's moments: a type for both, or FIRST/SECOND, such as bf16/fp32");
  visit_fields(o.shard, visit);
}

template <typename Visit>
void visit_machine(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "machine"};
  row(o.device, "device", "NAME", "Where to compute; auto: a GPU where there is one");
  row(o.cuda_graph, "cuda-graph", kFlagType, "Record a step once and replay it as one launch");
  row(o.threads, "threads", "N", "Computing threads of each rank; 0: the cores, shared evenly", 0,
      4096);
  row(o.checked, "checked", kFlagType,
      "Ranks compare what they are about to do; parameters that are not there read NaN");
  row(o.timeout, "timeout", "SECONDS", "How long any wait for other ranks may take", 0.001, 1e9);
  row(o.build.seed, "seed", "N", "Of initial weights, shuffling, rounding and sampling", 0,
      kLargestWhole);
  row(o.deterministic, "deterministic", kFlagType,
      "Refuse operations whose result may differ from run to run");
}

template <typename Visit>
void visit_checkpoints(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "checkpoints"};
  row(o.checkpoint_dir, "checkpoint-dir", "DIR",
      "Where the run's checkpoints are; auto: runs/NAME-DATE, a new directory; none");
  row(o.checkpoint_every, "checkpoint-every", "N", "Steps between checkpoints; 0: only at the end",
      0, kMany);
  row(o.saving.keep.keep_last, "keep-last", "N", "How many of the newest stay; 0: all", 0, kMany);
  row(o.saving.keep.keep_every, "keep-every", "N", "Multiples of this stay for ever; 0: none", 0,
      kMany);
  row(o.saving.mode, "save", "HOW", "Beside the training, or before it goes on");
  row(o.saving.form.model_dtype, "checkpoint-dtype", "DTYPE",
      "Of the stored weights; exact: what the optimizer updates", 0, 0, "exact");
  row(o.saving.write.chunk_bytes, "write-chunk", kBytesType, "Memory beside the state while saving",
      1);
  row(o.resume, "resume", "auto|never|PATH",
      "auto: go on with the latest checkpoint of --checkpoint-dir, if there is one");
  row(o.restart_data, "restart-data", kFlagType,
      "Resume, but begin the data anew: for other data, another --sequence or --seed");
  row(o.loading.allow_missing, "allow-missing", "PATTERN...",
      "Tensors that what is loaded may lack; they keep their initial values");
  row(o.loading.extra, "allow-extra", kFlagType,
      "What is loaded may have tensors that the model does not have");
  row(o.export_dir, "export-dir", "DIR",
      "Where whole weights are written in HuggingFace's form, as they compute; none without it");
  row(o.export_every, "export-every", "N",
      "Steps between exports, each in a directory of its own; 0: only at the end", 0, kMany);
  row(o.patches, "patches", "DIR",
      "Write what changes in the weights here, for receivers (docs/weights-out.md)");
  row(o.patch_every, "patch-every", "N", "Steps between patches", 1, kMany);
  row(o.patching.names, "patch-names", "NAMES",
      "Of tensors in patches: as published, or fused as vLLM has them");
  row(o.patching.keep, "keep-patches", "N",
      "Patches between full ones; what is older than two full ones is removed. 0: keeps all", 0,
      kMany);
}

template <typename Visit>
void visit_output(TrainOptions& o, const Visit& visit) {
  const Rows<Visit> row{visit, "output"};
  row(o.log, "log", "FILE",
      "JSON lines, one per step; auto: log.jsonl in --checkpoint-dir; none; wandb:PROJECT: auto, "
      "and "
      "Weights & Biases");
  row(o.tensorboard, "tensorboard", "DIR", "TensorBoard event files");
  row(o.report, "report", "FILE",
      "A page with curves, memory and a timeline; auto: report.html in --checkpoint-dir; none");
  row(o.trace, "trace", "FILE",
      "Spans of some steps, of all ranks, for Perfetto or chrome://tracing");
  row(o.trace_steps, "trace-steps", "FIRST-LAST",
      "Which steps, counted from the start of this process");
  row(o.log_every, "log-every", "N",
      "Steps between lines; 0: every step of a short run, else now and then", 0, kMany);
  row(o.sample, "sample", "TEXT",
      "What the sample at the end begins with, or what a model of chats is asked; auto: 'The ', or "
      "the first question of --data; '': no sample");
  row(o.sample_tokens, "sample-tokens", "N", "Its length", 1, 0x1p20);
  row(o.peak_tflops, "peak-tflops", "X|auto",
      "What one rank's device can compute at most, for MFU; auto: of known GPUs, by name; 0: not "
      "shown",
      0, 1e9, kAuto);
  row(o.quiet, "quiet", kFlagType, "Print nothing but errors");
}

// Calls visit(value, flag) for every setting.
template <typename Visit>
void visit_settings(TrainOptions& options, const Visit& visit) {
  const auto visit_flag = [&](const OptionField&, auto& value, const auto& flag) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(flag)>, OptionFlag>)
      visit(value, flag);
  };
  visit_model(options, visit_flag);
  visit_data(options, visit_flag);
  visit_optimizer(options, visit_flag);
  visit_sharding(options, visit_flag);
  visit_machine(options, visit_flag);
  visit_checkpoints(options, visit_flag);
  visit_output(options, visit_flag);
}

// --- texts and JSON ------------------------------------------------------------------------------

template <typename Value>
SettingKind kind_of(const OptionFlag& flag) {
  if (kIsList<Value>) return SettingKind::kList;
  if (flag.type == kFlagType) return SettingKind::kFlag;
  const bool is_number = std::is_arithmetic_v<Value> && flag.type != kBytesType;
  return is_number ? SettingKind::kNumber : SettingKind::kText;
}

// A JSON value as it would be typed on a command line.
std::string typed(const nlohmann::json& value, const std::string& option) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  throw UsageError(concat(option, " is ", value.dump(), "; it must be a number, a text or a flag"));
}

std::vector<std::string> typed_values(const nlohmann::json& value, SettingKind kind,
                                      const std::string& option) {
  if (!value.is_array()) return {typed(value, option)};
  if (kind != SettingKind::kList)
    throw UsageError(concat(option, " is ", value.dump(), "; it must be a single value"));
  std::vector<std::string> values;
  for (const nlohmann::json& each : value) values.push_back(typed(each, option));
  return values;
}

nlohmann::ordered_json to_json(const Setting& setting) {
  if (setting.kind == SettingKind::kList) return setting.values;
  if (setting.kind == SettingKind::kText) return setting.values.front();
  return nlohmann::ordered_json::parse(setting.values.front());
}

std::string key_of(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace

std::string Setting::key() const { return key_of(name); }

std::vector<Setting> settings(TrainOptions options) {
  std::vector<Setting> rows;
  std::vector<std::string> groups;
  const auto place = [&](const std::string& group) {
    return std::find(groups.begin(), groups.end(), group);
  };
  visit_settings(options, [&]<typename Value>(const Value& value, const OptionFlag& flag) {
    rows.push_back({.group = std::string(flag.group),
                    .name = flag.name,
                    .type = std::string(flag.type),
                    .help = flag.help,
                    .kind = kind_of<Value>(flag),
                    .values = option_texts(value, flag)});
    if (place(rows.back().group) == groups.end()) groups.push_back(rows.back().group);
  });
  // A part of the library may have settings in several groups.
  std::stable_sort(rows.begin(), rows.end(), [&](const Setting& a, const Setting& b) {
    return place(a.group) < place(b.group);
  });
  return rows;
}

void apply_given(TrainOptions& options, const GivenValues& given) {
  size_t num_known = 0;
  visit_settings(options, [&](auto& value, const OptionFlag& flag) {
    const auto found = given.find(flag.name);
    if (found == given.end()) return;
    read_option(concat("--", flag.name), found->second, value, flag);
    ++num_known;
  });
  FSDP_ASSERT(num_known == given.size());
}

void apply_config(TrainOptions& options, std::string_view text, const std::string& source) {
  const nlohmann::json document = parse_json(text, source);
  if (!document.is_object())
    throw UsageError(concat(source, ": a config file is one JSON object, e.g. {\"steps\": 100}"));
  std::vector<std::string> keys;
  for (const Setting& setting : settings()) keys.push_back(setting.key());
  for (const auto& [key, value] : document.items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    throw UsageError(concat(source, ": '", key, "' is no setting; ", meant_text(key, keys),
                            "fsdp train --print-config lists them all"));
  }
  visit_settings(options, [&]<typename Value>(Value& value, const OptionFlag& flag) {
    const std::string key = key_of(flag.name);
    const auto found = document.find(key);
    if (found == document.end()) return;
    const std::string option = concat(source, ": ", key);
    read_option(option, typed_values(*found, kind_of<Value>(flag), option), value, flag);
  });
}

std::vector<std::pair<std::string, std::string>> setting_facts(const TrainOptions& options) {
  std::vector<std::pair<std::string, std::string>> facts;
  for (const Setting& setting : settings(options))
    facts.emplace_back(concat("--", setting.name), join(setting.values, " "));
  return facts;
}

std::string config_text(const TrainOptions& options) {
  nlohmann::ordered_json document;
  for (const Setting& setting : settings(options)) document[setting.key()] = to_json(setting);
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::vector<SettingRow> shown_settings(const TrainOptions& given, const TrainOptions& resolved) {
  const std::vector<Setting> defaults = settings();
  const std::vector<Setting> chosen = settings(given);
  std::vector<SettingRow> shown;
  for (const Setting& setting : settings(resolved)) {
    const size_t i = shown.size();
    shown.push_back({.group = setting.group,
                     .name = setting.name,
                     .value = join(setting.values, " "),
                     .is_changed = chosen[i].values != defaults[i].values,
                     .help = setting.help});
  }
  return shown;
}

}  // namespace fsdp::train
