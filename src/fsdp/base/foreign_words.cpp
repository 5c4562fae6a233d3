#include "fsdp/base/foreign_words.h"

#include <algorithm>
#include <cctype>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

constexpr std::string_view kAllRanks = "sequences of all ranks and microbatches together";
constexpr std::string_view kOuterAxis = "optim is +hfsdp behind it, with --outer above 1";
// These are always so here.
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
constexpr std::string_view kPinned = "offloaded state is always page-locked";
constexpr std::string_view kTravels = "chunks always travel while others are updated";
constexpr std::string_view kSameCodes = "the backward reads the codes of the forward";

constexpr ForeignWord kForeignWords[] = {
    // --- our own, of before ---
    {"budget", "pool-budget", {}, "the limit of the pool; that of a whole rank is fsdp plan's"},
    {"budget-bytes", "pool-budget-bytes"},
    {"first-moment", "moments", {}, "the first of FIRST/SECOND, e.g. --moments bf16/fp32"},
    {"second-moment", "moments", {}, "the second of FIRST/SECOND, e.g. --moments bf16/fp32"},
    {"muon-momentum", "momentum"},
    {"from-scratch", "init", "none"},
    {"decay-vectors", "rule", {}, "such as '*.bias|*norm* decay=0.1'"},
    {"offload-pin no-offload-pin", "offload", {}, kPinned, kNeedless},
    {"offload-overlap no-offload-overlap", "offload", {}, kTravels, kNeedless},
    {"offload-chunk", "offload", {}, "chunks have a fixed size", kNeedless},
    {"on-move", "pool", {}, "units of a run come in one order", kNeedless},
    {"load-chunk", "write-chunk", {}, "loading takes 64 MiB at a time", kNeedless},
    {"read-threads", "threads", {}, "two threads read a rank's checkpoint", kNeedless},
    // --- length and batch ---
    {"max-steps max-train-steps max-iters train-iters total-steps", "steps"},
    {"num-train-epochs num-epochs", "epochs"},
    {"num-train-epochs num-epochs epochs",
     "steps",
     {},
     "or --tokens; an epoch is the data's tokens once"},
    {"train-tokens max-tokens", "tokens"},
    {"batch-size train-batch-size per-device-train-batch-size "
     "per-device-batch-size train-micro-batch-size-per-gpu micro-batch-size",
     "batch",
     {},
     kAllRanks},
    {"global-batch-size", "batch"},
    {"gradient-accumulation-steps accumulate-grad-batches grad-accum", "microbatches"},
    {"seq-length seq-len max-seq-length max-seq-len max-length sequence-length "
     "block-size context-length",
     "sequence"},
    // --- model and data ---
    {"model-name-or-path model-name", "model"},
    {"train-file train-data train-data-path data-path dataset", "data"},
    {"validation-file valid-data eval-data", "validation-data"},
    {"eval-steps eval-interval eval-every", "validate-every"},
    {"eval-iters", "validation-batches"},
    {"packing sample-packing", "documents", "packed"},
    {"wandb wandb-project report-to", "log", "wandb:PROJECT"},
    {"compile torch-compile", "compute", {}, "kernels are compiled already", kNeedless},
    {"dropout attention-dropout hidden-dropout",
     "weight-decay",
     {},
     "models are trained without dropout",
     kNeedless},
    // --- optimizer ---
    {"learning-rate", "lr"},
    {"optim", "optimizer"},
    {"lr-scheduler lr-scheduler-type lr-decay-style", "schedule"},
    {"warmup-steps warmup-iters num-warmup-steps lr-warmup-iters", "warmup"},
    {"adam-beta1", "beta1"},
    {"adam-beta2", "beta2"},
    {"adam-epsilon adam-eps", "eps"},
    {"wd", "weight-decay"},
    {"max-grad-norm clip-grad grad-clip gradient-clipping gradient-clip-val", "clip"},
    // --- adapters ---
    {"lora-r lora-rank lora-dim", "lora"},
    {"lora-target-modules target-modules lora-target", "lora-on"},
    {"peft use-peft use-lora", "lora", "16"},
    // --- types ---
    {"bf16", "compute", "bf16"},
    {"fp16", "compute", "fp16"},
    {"fp32", "compute", "fp32"},
    {"dtype torch-dtype param-dtype precision mixed-precision", "compute"},
    {"reduce-dtype", "grad-comm"},
    {"fp8", "weights", "fp8-row"},
    // --- sharding ---
    {"fsdp", "strategy", "optim_grads_params"},
    {"zero zero-stage stage",
     "strategy",
     {},
     "stages 1, 2, 3 are optim, optim_grads, optim_grads_params"},
    {"sharding-strategy fsdp-sharding-strategy", "strategy"},
    {"num-gpus nproc-per-node num-processes world-size gpus devices", "ranks"},
    {"dp data-parallel-size dp-shard", "ranks", {}, "of all axes: those of --tp are among them"},
    {"nodes nnodes num-nodes", "ranks", {}, "hosts are the launcher's: mpirun, srun or torchrun"},
    {"pp pipeline-parallel-size pipeline-model-parallel-size",
     "tp",
     {},
     "layers are not shared out in stages"},
    {"cp context-parallel-size", "tp", {}, "whose ranks share the tokens between layers"},
    {"gpu-memory gpu-memory-utilization max-memory",
     "pool-budget",
     {},
     "of gathered weights; fsdp plan --fit says what fits into a device"},
    {"replicas dp-replicate data-parallel-replicate-degree", "outer"},
    {"tensor-parallel-size tensor-parallel-degree tensor-model-parallel-size "
     "tp-size",
     "tp"},
    {"expert-parallel-size expert-model-parallel-size ep-size", "ep"},
    {"cpu-offload offload-optimizer", "offload", "1"},
    {"gradient-checkpointing activation-checkpointing recompute-activations", "recompute", "block"},
    // --- Megatron-LM: sharding ---
    {"use-megatron-fsdp use-custom-fsdp use-torch-fsdp2", "strategy", "optim_grads_params"},
    {"use-distributed-optimizer", "strategy", "optim"},
    {"data-parallel-sharding-strategy", "strategy"},
    {"zero-dp-strategy", "strategy", {}, "0 to 3 are no_shard to optim_grads_params"},
    {"outer-dp-sharding-strategy", "strategy", {}, kOuterAxis},
    {"num-distributed-optimizer-instances", "outer"},
    {"overlap-param-gather", "prefetch", "1"},
    {"overlap-grad-reduce", "prefetch", {}, kOverlaps, kNeedless},
    {"average-in-collective ddp-average-in-collective "
     "gradient-reduce-div-fusion",
     "strategy",
     {},
     kDivided,
     kNeedless},
    {"calculate-per-token-loss", "batch", {}, kPerToken, kNeedless},
    {"bucket-size ddp-bucket-size", "pool", {}, kBuckets, kNeedless},
    {"enable-fine-grained-param-gather "
     "megatron-fsdp-enable-fine-grained-param-gather",
     "prefetch",
     {},
     kWholeUnits,
     kNeedless},
    {"fsdp-all-gather-in-start-param-sync", "prefetch", {}, kFirstGather, kNeedless},
    {"create-all-gather-group", "prefetch", {}, kGathers, kNeedless},
    {"init-model-with-meta-device", "strategy", {}, kShards, kNeedless},
    {"suggested-communication-unit-size", "pool-budget", {}, "in bytes"},
    {"fsdp-double-buffer", "pool", "double_buffer"},
    {"max-pool-double-buffer maxpool-double-buffer "
     "megatron-fsdp-max-pool-double-buffer",
     "pool", "max_pool"},
    {"fsdp-db-use-persist-buf-on-alloc-fail", "other-units", "persistent"},
    {"nccl-ub use-nccl-ub", "user-buffers", "symmetric"},
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
    {"exp-avg-dtype", "moments", {}, "the first of FIRST/SECOND"},
    {"exp-avg-sq-dtype", "moments", {}, "the second of FIRST/SECOND"},
    {"use-decoupled-grad megatron-fsdp-use-decoupled-grad", "main-grads", {}, kAnyType, kNeedless},
    {"fp8-param-gather fp8-format", "weights", "fp8-row"},
    {"keep-fp8-transpose-cache", "weights", {}, kSameCodes, kNeedless},
    {"check-for-nan-in-grad check-for-nan-in-loss-and-grad", "on-nonfinite", "skip"},
    // --- Megatron-LM: offloading, graphs ---
    {"optimizer-cpu-offload", "offload", "1"},
    {"optimizer-offload-fraction", "offload"},
    {"overlap-cpu-optimizer-d2h-h2d", "offload", {}, kTravels, kNeedless},
    {"pin-cpu-params pin-cpu-grads", "offload", {}, kPinned, kNeedless},
    {"enable-cuda-graph cuda-graph-impl cuda-graph-mode "
     "megatron-fsdp-cuda-graph-mode",
     "cuda-graph"},
    // --- machine, checkpoints and output ---
    {"use-cpu no-cuda", "device", "cpu"},
    {"dry-run", "check"},
    {"output-dir save-dir ckpt-dir checkpoint-path", "checkpoint-dir"},
    {"save-steps save-interval save-every", "checkpoint-every"},
    {"save-total-limit", "keep-last"},
    {"ckpt-format", "checkpoint-dir", {}, "checkpoints have one format", kNeedless},
    {"resume-from-checkpoint", "resume"},
    {"load", "init"},
    {"logging-steps log-interval", "log-every"},
    {"logging-dir tensorboard-dir", "tensorboard"},
    // --- values: strategies ---
    {"ddp zero0", "no_shard"},
    {"zero1", "optim"},
    {"zero2 shard-grad-op", "optim_grads"},
    {"zero3 fsdp fsdp2 full-shard hsdp hybrid-shard", "optim_grads_params"},
    {"hfsdp", "optim_grads_params+hfsdp"},
    // --- values: types, and others ---
    {"float64 double", "fp64"},
    {"float32 float", "fp32"},
    {"bfloat16", "bf16"},
    {"float16 half", "fp16"},
    {"float8 float8-e4m3fn", "fp8_e4m3"},
    {"float8-e5m2", "fp8_e5m2"},
    {"adam adamw-torch adamw-torch-fused", "adamw"},
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

namespace {

struct Meaning {
  const ForeignWord* row = nullptr;  // null: none
  std::string candidate = {};
};

Meaning meaning_of(std::string_view word, std::span<const std::string> candidates) {
  const std::string form = in_form_of_table(word);
  for (const ForeignWord& row : kForeignWords) {
    if (concat(" ", row.words, " ").find(concat(" ", form, " ")) == std::string::npos) continue;
    const std::string name = in_form_of_table(row.name);
    for (const std::string& candidate : candidates)
      if (in_form_of_table(candidate) == name) return {&row, candidate};
  }
  return {};
}

}  // namespace

std::string same_value(std::string_view word, std::span<const std::string> candidates) {
  const auto [row, candidate] = meaning_of(word, candidates);
  const bool is_same = row != nullptr && row->value.empty() && row->note.empty();
  return is_same ? candidate : "";
}

std::string meant_text(std::string_view word, std::span<const std::string> candidates) {
  if (const auto [row, candidate] = meaning_of(word, candidates); row != nullptr)
    return row->is_needless ? concat(row->note, ", so leave it out. ")
                            : concat("did you mean ", shown_with_value(candidate, row->value),
                                     row->note.empty() ? "" : concat(" (", row->note, ")"), "? ");
  const std::string near = nearest(word, candidates);
  return near.empty() ? "" : concat("did you mean '", near, "'? ");
}

}  // namespace fsdp
