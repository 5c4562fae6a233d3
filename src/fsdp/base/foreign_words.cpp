#include "fsdp/base/foreign_words.h"

#include <algorithm>
#include <cctype>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr std::string_view kAllRanks = "sequences of all ranks and microbatches together";
constexpr std::string_view kOuterAxis = "optim is +hfsdp behind it, with --outer above 1";
// What is always so here.
constexpr bool kNeedless = true;
constexpr std::string_view kDivided = "gradients are divided in the reduction";
constexpr std::string_view kOverlaps = "reductions always run beside the backward";
constexpr std::string_view kGathers = "gathers have a communicator of their own";
constexpr std::string_view kBuckets = "a unit is always one bucket per type";
constexpr std::string_view kShards = "a rank makes its own shards alone";
constexpr std::string_view kWholeUnits = "a unit is gathered as a whole";
constexpr std::string_view kFirstGather = "the first gather starts by itself";
constexpr std::string_view kPerToken = "the loss is the mean over all learnt tokens";
constexpr std::string_view kRegistered = "buffers are registered after the first step";
constexpr std::string_view kAnyType = "the optimizer reads main gradients of any type";
constexpr std::string_view kSameCodes = "the backward reads the codes of the forward";

constexpr ForeignWord kForeignWords[] = {
    // --- our own, of before ---
    {"budget", "pool-budget", {}, "the limit of the pool; that of a whole rank is fsdp plan's"},
    {"budget-bytes", "pool-budget-bytes"},
    // --- length and batch ---
    {"max-steps", "steps"},
    {"max-train-steps", "steps"},
    {"max-iters", "steps"},
    {"train-iters", "steps"},
    {"total-steps", "steps"},
    {"num-train-epochs", "epochs"},
    {"num-train-epochs", "steps", {}, "or --tokens; an epoch is the data's tokens once"},
    {"num-epochs", "epochs"},
    {"num-epochs", "steps", {}, "or --tokens; an epoch is the data's tokens once"},
    {"epochs", "steps", {}, "or --tokens; an epoch is the data's tokens once"},
    {"train-tokens", "tokens"},
    {"max-tokens", "tokens"},
    {"batch-size", "batch", {}, kAllRanks},
    {"global-batch-size", "batch"},
    {"train-batch-size", "batch", {}, kAllRanks},
    {"per-device-train-batch-size", "batch", {}, kAllRanks},
    {"per-device-batch-size", "batch", {}, kAllRanks},
    {"train-micro-batch-size-per-gpu", "batch", {}, kAllRanks},
    {"micro-batch-size", "batch", {}, kAllRanks},
    {"gradient-accumulation-steps", "microbatches"},
    {"accumulate-grad-batches", "microbatches"},
    {"grad-accum", "microbatches"},
    {"seq-length", "sequence"},
    {"seq-len", "sequence"},
    {"max-seq-length", "sequence"},
    {"max-seq-len", "sequence"},
    {"max-length", "sequence"},
    {"sequence-length", "sequence"},
    {"block-size", "sequence"},
    {"context-length", "sequence"},
    // --- model and data ---
    {"model-name-or-path", "model"},
    {"model-name", "model"},
    {"train-file", "data"},
    {"train-data", "data"},
    {"train-data-path", "data"},
    {"data-path", "data"},
    {"dataset", "data"},
    {"validation-file", "validation-data"},
    {"valid-data", "validation-data"},
    {"eval-data", "validation-data"},
    {"eval-steps", "validate-every"},
    {"eval-interval", "validate-every"},
    {"eval-iters", "validation-batches"},
    // --- optimizer ---
    {"learning-rate", "lr"},
    {"optim", "optimizer"},
    {"lr-scheduler", "schedule"},
    {"lr-scheduler-type", "schedule"},
    {"lr-decay-style", "schedule"},
    {"warmup-steps", "warmup"},
    {"warmup-iters", "warmup"},
    {"num-warmup-steps", "warmup"},
    {"lr-warmup-iters", "warmup"},
    {"adam-beta1", "beta1"},
    {"adam-beta2", "beta2"},
    {"adam-epsilon", "eps"},
    {"adam-eps", "eps"},
    {"wd", "weight-decay"},
    {"max-grad-norm", "clip"},
    {"clip-grad", "clip"},
    {"grad-clip", "clip"},
    {"gradient-clipping", "clip"},
    {"gradient-clip-val", "clip"},
    // --- types ---
    {"bf16", "compute", "bf16"},
    {"fp16", "compute", "fp16"},
    {"fp32", "compute", "fp32"},
    {"dtype", "compute"},
    {"torch-dtype", "compute"},
    {"param-dtype", "compute"},
    {"precision", "compute"},
    {"mixed-precision", "compute"},
    {"reduce-dtype", "grad-comm"},
    {"fp8", "weights", "fp8-row"},
    // --- sharding ---
    {"fsdp", "strategy", "optim_grads_params"},
    {"zero-stage", "strategy", {}, "stages 1, 2, 3 are optim, optim_grads, optim_grads_params"},
    {"stage", "strategy", {}, "stages 1, 2, 3 are optim, optim_grads, optim_grads_params"},
    {"sharding-strategy", "strategy"},
    {"fsdp-sharding-strategy", "strategy"},
    {"num-gpus", "ranks"},
    {"nproc-per-node", "ranks"},
    {"num-processes", "ranks"},
    {"world-size", "ranks"},
    {"gpus", "ranks"},
    {"devices", "ranks"},
    {"replicas", "outer"},
    {"dp-replicate", "outer"},
    {"data-parallel-replicate-degree", "outer"},
    {"tensor-parallel-size", "tp"},
    {"tensor-parallel-degree", "tp"},
    {"tensor-model-parallel-size", "tp"},
    {"tp-size", "tp"},
    {"expert-parallel-size", "ep"},
    {"expert-model-parallel-size", "ep"},
    {"ep-size", "ep"},
    {"cpu-offload", "offload", "1"},
    {"offload-optimizer", "offload", "1"},
    {"gradient-checkpointing", "recompute", "block"},
    {"activation-checkpointing", "recompute", "block"},
    {"recompute-activations", "recompute", "block"},
    // --- Megatron-LM: sharding ---
    {"use-megatron-fsdp", "strategy", "optim_grads_params"},
    {"use-custom-fsdp", "strategy", "optim_grads_params"},
    {"use-torch-fsdp2", "strategy", "optim_grads_params"},
    {"use-distributed-optimizer", "strategy", "optim"},
    {"data-parallel-sharding-strategy", "strategy"},
    {"zero-dp-strategy", "strategy", {}, "0 to 3 are no_shard to optim_grads_params"},
    {"outer-dp-sharding-strategy", "strategy", {}, kOuterAxis},
    {"num-distributed-optimizer-instances", "outer"},
    {"overlap-param-gather", "prefetch", "1"},
    {"overlap-grad-reduce", "prefetch", {}, kOverlaps, kNeedless},
    {"average-in-collective", "strategy", {}, kDivided, kNeedless},
    {"ddp-average-in-collective", "strategy", {}, kDivided, kNeedless},
    {"gradient-reduce-div-fusion", "strategy", {}, kDivided, kNeedless},
    {"calculate-per-token-loss", "batch", {}, kPerToken, kNeedless},
    {"bucket-size", "pool", {}, kBuckets, kNeedless},
    {"ddp-bucket-size", "pool", {}, kBuckets, kNeedless},
    {"enable-fine-grained-param-gather", "prefetch", {}, kWholeUnits, kNeedless},
    {"megatron-fsdp-enable-fine-grained-param-gather", "prefetch", {}, kWholeUnits, kNeedless},
    {"fsdp-all-gather-in-start-param-sync", "prefetch", {}, kFirstGather, kNeedless},
    {"create-all-gather-group", "prefetch", {}, kGathers, kNeedless},
    {"init-model-with-meta-device", "strategy", {}, kShards, kNeedless},
    {"suggested-communication-unit-size", "pool-budget", {}, "in bytes"},
    {"fsdp-double-buffer", "pool", "double_buffer"},
    {"max-pool-double-buffer", "pool", "max_pool"},
    {"maxpool-double-buffer", "pool", "max_pool"},
    {"megatron-fsdp-max-pool-double-buffer", "pool", "max_pool"},
    {"fsdp-db-use-persist-buf-on-alloc-fail", "other-units", "persistent"},
    {"nccl-ub", "user-buffers", "symmetric"},
    {"use-nccl-ub", "user-buffers", "symmetric"},
    {"disable-symmetric-registration", "user-buffers", "registered"},
    {"fsdp-manual-registration", "user-buffers", {}, kRegistered, kNeedless},
    // --- Megatron-LM: types ---
    {"megatron-fsdp-main-params-dtype", "main-params", {}, "auto is none"},
    {"megatron-fsdp-main-grads-dtype", "main-grads", {}, "auto is none"},
    {"megatron-fsdp-grad-comm-dtype", "grad-comm", {}, "auto is none"},
    {"main-params-dtype", "main-params"},
    {"main-grads-dtype", "main-grads"},
    {"grad-comm-dtype", "grad-comm"},
    {"grad-reduce-in-bf16", "grad-comm", "bf16"},
    {"grad-reduce-in-fp32", "grad-comm", "fp32"},
    {"accumulate-allreduce-grads-in-fp32", "main-grads", "fp32"},
    {"use-precision-aware-optimizer", "moments", {}, "and --main-grads, --main-params"},
    {"exp-avg-dtype", "first-moment"},
    {"exp-avg-sq-dtype", "second-moment"},
    {"use-decoupled-grad", "main-grads", {}, kAnyType, kNeedless},
    {"megatron-fsdp-use-decoupled-grad", "main-grads", {}, kAnyType, kNeedless},
    {"fp8-param-gather", "weights", "fp8-row"},
    {"fp8-format", "weights", "fp8-row"},
    {"keep-fp8-transpose-cache", "weights", {}, kSameCodes, kNeedless},
    {"check-for-nan-in-grad", "on-nonfinite", "skip"},
    {"check-for-nan-in-loss-and-grad", "on-nonfinite", "skip"},
    // --- Megatron-LM: offloading, graphs ---
    {"optimizer-cpu-offload", "offload", "1"},
    {"optimizer-offload-fraction", "offload"},
    {"overlap-cpu-optimizer-d2h-h2d", "offload-overlap"},
    {"pin-cpu-params", "offload-pin"},
    {"pin-cpu-grads", "offload-pin"},
    {"no-pin-cpu-params", "offload-pin", {}, "--no-offload-pin turns it off"},
    {"no-pin-cpu-grads", "offload-pin", {}, "--no-offload-pin turns it off"},
    {"enable-cuda-graph", "cuda-graph"},
    {"cuda-graph-impl", "cuda-graph"},
    {"cuda-graph-mode", "cuda-graph"},
    {"megatron-fsdp-cuda-graph-mode", "cuda-graph"},
    // --- machine, checkpoints and output ---
    {"use-cpu", "device", "cpu"},
    {"no-cuda", "device", "cpu"},
    {"dry-run", "check"},
    {"output-dir", "checkpoint-dir"},
    {"save-dir", "checkpoint-dir"},
    {"ckpt-dir", "checkpoint-dir"},
    {"checkpoint-path", "checkpoint-dir"},
    {"save-steps", "checkpoint-every"},
    {"save-interval", "checkpoint-every"},
    {"save-total-limit", "keep-last"},
    {"ckpt-format", "checkpoint-dir", {}, "checkpoints have one format", kNeedless},
    {"resume-from-checkpoint", "resume"},
    {"load", "init"},
    {"logging-steps", "log-every"},
    {"log-interval", "log-every"},
    {"logging-dir", "tensorboard"},
    {"tensorboard-dir", "tensorboard"},
    // --- values: strategies ---
    {"ddp", "no_shard"},
    {"zero0", "no_shard"},
    {"zero1", "optim"},
    {"zero2", "optim_grads"},
    {"shard-grad-op", "optim_grads"},
    {"zero3", "optim_grads_params"},
    {"fsdp", "optim_grads_params"},
    {"fsdp2", "optim_grads_params"},
    {"full-shard", "optim_grads_params"},
    {"hsdp", "optim_grads_params", {}, "with --outer above 1"},
    {"hybrid-shard", "optim_grads_params", {}, "with --outer above 1"},
    {"hfsdp", "optim_grads_params+hfsdp"},
    // --- values: types, and others ---
    {"float64", "fp64"},
    {"double", "fp64"},
    {"float32", "fp32"},
    {"float", "fp32"},
    {"bfloat16", "bf16"},
    {"float16", "fp16"},
    {"half", "fp16"},
    {"float8", "fp8_e4m3"},
    {"float8-e4m3fn", "fp8_e4m3"},
    {"float8-e5m2", "fp8_e5m2"},
    {"adam", "adamw"},
    {"adamw-torch", "adamw"},
    {"adamw-torch-fused", "adamw"},
    {"cosine-with-min-lr", "cosine"},
    {"constant-with-warmup", "constant"},
    {"gpu", "cuda"},
    {"full", "block"},
};

// "--Learning_Rate" and "zero-3" as the table writes them.
std::string in_form_of_table(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  std::string form(word);
  for (char& c : form)
    c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  constexpr std::string_view kStage = "zero-";
  if (form.starts_with(kStage) && form.size() == kStage.size() + 1)
    form.erase(kStage.size() - 1, 1);
  return form;
}

// A candidate with what it takes: "--compute bf16"; of a config file "compute": "bf16".
std::string shown_with_value(const std::string& candidate, std::string_view value) {
  if (value.empty()) return concat("'", candidate, "'");
  return candidate.starts_with('-') ? concat("'", candidate, " ", value, "'")
                                    : concat("\"", candidate, "\": \"", value, "\"");
}

}  // namespace

std::span<const ForeignWord> foreign_words() { return kForeignWords; }

std::string meant_text(std::string_view word, std::span<const std::string> candidates) {
  const std::string form = in_form_of_table(word);
  for (const ForeignWord& row : kForeignWords) {
    if (row.word != form) continue;
    const std::string name = in_form_of_table(row.name);
    for (const std::string& candidate : candidates)
      if (in_form_of_table(candidate) == name)
        return row.is_needless ? concat(row.note, ", so leave it out. ")
                               : concat("did you mean ", shown_with_value(candidate, row.value),
                                        row.note.empty() ? "" : concat(" (", row.note, ")"), "? ");
  }
  const std::string near = nearest(word, candidates);
  return near.empty() ? "" : concat("did you mean '", near, "'? ");
}

}  // namespace fsdp
