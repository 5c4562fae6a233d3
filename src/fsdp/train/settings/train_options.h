// Every decision of a person about a training run, as plain data: the options of the library's
// parts, and what the run itself needs.
//
// The list in settings.cpp gives each field its name on the command line and in a config file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/data/batches.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/learning_rate.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/optimizer_options.h"
#include "fsdp/shard/options.h"

namespace fsdp::train {

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
enum class OptimizerChoice : uint8_t { kAdamW, kSgd, kMuon };

// Steps of a process, from its first one on, which is 1; both ends belong to it.
struct StepRange {
  int64_t first = 1;
  int64_t last = 1;
};

// "3-5", "7".
std::string to_text(const StepRange& range);
void read_text(const std::string& option, const std::string& text, StepRange& value);

// The types of the optimizer's running averages: of gradients (SGD, Muon: the momentum), and of
// their squares. nullopt: none, which is for plans.
struct MomentTypes {
  std::optional<DType> first = DType::kFloat32;
  std::optional<DType> second = DType::kFloat32;
};

// "bf16" for both, "bf16/fp32".
std::string to_text(const MomentTypes& moments);
void read_text(const std::string& option, const std::string& text, MomentTypes& value);

// The device that a rank computes on, with the facts found about it.
struct RankDevice {
  DeviceChoice device = DeviceChoice::kCpu;
  DType compute = DType::kFloat32;
  double peak_tflops = 0;    // its peak in `compute`; 0: not known
  int64_t memory_bytes = 0;  // that each of its ranks can have; 0: not known
};

// Fields of parts that are not set by a person are filled in by run_options.h.
struct TrainOptions {
  // --- model ---
  std::string model = "tiny";  // a preset, or the path of a config.json or of its directory
  std::string init;  // weights to begin with; "": the model's, if it has some; "none": random ones
  std::optional<int64_t> vocabulary = std::nullopt;  // nullopt: the model's, or as the data needs
  std::optional<DType> compute = std::nullopt;  // of weights and activations; nullopt: by device
  BuildOptions build = {.seed = 1};             // the seed also is that of shuffling and sampling

  // --- data ---
  std::vector<std::string> data;             // text, rows, directories, packed token files
  std::vector<double> data_weights;          // of the paths of `data`; none: all of it once
  std::vector<std::string> validation_data;  // none: a part of `data`
  std::string tokenizer = "auto";            // of text: a path, or bytes; auto: the model's
  std::string field;                         // of rows; "": by what they have
  double validation_fraction = 0.02;
  std::optional<WindowDocuments> documents = std::nullopt;  // nullopt: see window_documents()
  std::optional<int64_t> sequence = std::nullopt;        // nullopt: 128, or see choose_sequence()
  int64_t batch = 8;                                     // sequences per step, of all ranks
  int64_t microbatches = 1;                              // of each rank and step
  std::optional<int64_t> validate_every = std::nullopt;  // nullopt: ten times in a run
  int64_t validation_batches = 16;

  // --- length ---
  int64_t steps = 500;
  int64_t tokens = 0;  // 0: `steps` counts
  double epochs = 0;   // 0: the two above count; plan_run() sets `steps` by it

  // --- optimizer ---
  OptimizerChoice optimizer = OptimizerChoice::kAdamW;
  std::optional<double> lr = std::nullopt;  // nullopt: by what is trained
  RateSchedule schedule = RateSchedule::kCosine;
  std::optional<int64_t> warmup = std::nullopt;  // nullopt: a tenth of the steps, at most 1000
  std::optional<double> min_lr = std::nullopt;   // nullopt: a tenth of `lr`
  int64_t decay_steps = 0;                       // wsd
  RateDecay decay = RateDecay::kLinear;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::vector<ParameterRule> rules;
  std::optional<double> momentum = std::nullopt;  // nullopt: SGD's 0.9, Muon's 0.95
  bool nesterov = false;                          // SGD
  MuonScale muon_scale = MuonScale::kMatchAdamW;
  double adamw_rate = 1.0;  // Muon: AdamW's rate, relative to `lr`
  MomentTypes moments = {};
  StepOptions step = {.max_norm = 1.0, .measures_norm = true, .on_nonfinite = OnNonfinite::kSkip};

  // --- sharding ---
  int64_t ranks = 0;  // as threads of this process; 0: one, or as many as the launcher started
  int64_t outer = 1;
  int64_t ep = 1;
  int64_t tp = 1;
  ShardOptions shard = {.pool = PoolKind::kPlanned};

  // --- machine ---
  DeviceChoice device = DeviceChoice::kAuto;
  bool cuda_graph = false;
  int64_t threads = 0;  // of each rank on a CPU; 0: the cores, shared evenly
  bool checked = false;
  double timeout = 600.0;
  bool deterministic = false;

  // --- checkpoints ---
  std::string checkpoint_dir = "auto";  // of a plan, a path; "": none
  int64_t checkpoint_every = 100;       // 0: at the end alone
  CheckpointerOptions saving = {.keep = {.keep_last = 2}};
  LoadOptions loading = {};
  std::string resume = "auto";  // auto, never or a path
  bool restart_data = false;
  std::string export_dir;    // "": none
  int64_t export_every = 0;  // 0: at the end alone
  std::string patches;       // where patches of the weights are written; "": none
  int64_t patch_every = 1;   // steps
  PatchOptions patching = {};

  // --- what is seen ---
  std::string log = "auto";  // a path; auto: in the checkpoint directory; none; wandb:PROJECT
  std::string tensorboard;
  std::string report = "auto";  // the same
  std::string trace;            // a path; "": none
  StepRange trace_steps = {3, 5};
  int64_t log_every = 0;        // 0: every step of a short run, else now and then
  std::string sample = "auto";  // "": none
  int64_t sample_tokens = 200;
  // Peak of one rank's device; nullopt: by its name; 0: unknown.
  std::optional<double> peak_tflops = std::nullopt;
  bool quiet = false;

  // Checks the fields against each other for this many ranks, before anything is opened. Throws a
  // UsageError with the flags, their values and the fix.
  void validate(int64_t num_ranks) const;

  // The part of validate() that plans share: what does not go together with adapters.
  void check_adapters() const;

  // From `tokens` or `steps`; by `epochs` once plan_run() knows the data.
  int64_t total_steps() const;
  int64_t tokens_per_step() const { return batch * sequence_length(); }
  // Ranks of a tp group have the same sequences.
  int64_t data_parallel_size(int64_t num_ranks) const { return num_ranks / tp; }
  // Sequences that a rank computes at a time. UsageError for a batch that ranks cannot share.
  int64_t rows_of_rank(int64_t num_ranks) const;

  // With defaults filled in.
  int64_t sequence_length() const { return sequence.value_or(128); }
  double rate() const { return lr.value_or(4e-3); }
  int64_t validation_steps() const;  // between validations; 0: none
  LearningRateOptions rate_options() const;
  double sgd_momentum() const { return momentum.value_or(0.9); }
  double muon_momentum() const { return momentum.value_or(0.95); }

  // With every default filled in, for display.
  TrainOptions resolved(int64_t num_ranks, const RankDevice& found) const;

  // The project at Weights & Biases; "": none.
  std::string wandb_project() const;

  // The resolved paths; "": none.
  std::string log_path() const;
  std::string report_path() const;
};

}  // namespace fsdp::train
