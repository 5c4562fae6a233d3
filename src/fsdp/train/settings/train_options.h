// Every decision of a person about a training run, as plain data.
//
// The table in settings.h gives each field its name on the command line and in a config file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/layout/granularity.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/layout/strategy.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/learning_rate.h"
#include "fsdp/optim/parameter_rules.h"

namespace fsdp::train {

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
enum class DocumentsChoice : uint8_t { kAuto, kJoined, kSeparate };
enum class OptimizerChoice : uint8_t { kAdamW, kSgd, kMuon };
enum class MuonScaleChoice : uint8_t { kMatchAdamW, kOriginal };
enum class PatchNamesChoice : uint8_t { kHf, kVllm };
enum class RecomputeChoice : uint8_t { kNone, kBlock };
enum class LifetimeChoice : uint8_t { kPersistent, kStep };
enum class NonfiniteChoice : uint8_t { kUpdate, kSkip };
enum class UpdatesChoice : uint8_t { kHidden, kBlocking };
enum class SaveChoice : uint8_t { kBackground, kBlocking };

// Steps of a process, from its first one on, which is 1; both ends belong to it.
struct StepRange {
  int64_t first = 1;
  int64_t last = 1;
};

// "3-5", "7". UsageError in words that follow the option's name.
StepRange parse_step_range(std::string_view text);
std::string to_text(const StepRange& range);

// The device that a rank computes on, with the facts found about it.
struct RankDevice {
  DeviceChoice device = DeviceChoice::kCpu;
  DType compute = DType::kFloat32;
  double peak_tflops = 0;  // its peak in `compute`; 0: not known
};

struct TrainOptions {
  // --- model ---
  std::string model = "tiny";  // a preset, or the path of a config.json or of its directory
  std::string init;            // weights to begin with; "": the model's, if it has some
  bool from_scratch = false;   // random weights, even if the model has some
  std::optional<int64_t> vocabulary = std::nullopt;  // nullopt: the model's, or as the data needs
  std::optional<DType> compute = std::nullopt;  // of weights and activations; nullopt: by device
  RecomputeChoice recompute = RecomputeChoice::kNone;
  WeightRecipe weights = WeightRecipe::kPlain;
  std::vector<std::string> weights_except;
  WeightScaling weights_scaling = WeightScaling::kCurrent;
  ProductForm weights_gradient = ProductForm::kQuantized;
  int64_t logit_bytes = kDefaultLogitBytes;

  // --- data ---
  std::vector<std::string> data;             // text, rows, directories, packed token files
  std::vector<double> data_weights;          // of the paths of `data`; none: all of it once
  std::vector<std::string> validation_data;  // none: a part of `data`
  std::string tokenizer = "auto";            // of text: a path, or bytes; auto: the model's
  std::string field;                         // of rows; "": by what they have
  double validation_fraction = 0.02;
  DocumentsChoice documents = DocumentsChoice::kAuto;  // see window_documents()
  int64_t sequence = 128;
  int64_t batch = 8;         // sequences per step, of all ranks
  int64_t microbatches = 1;  // of each rank and step
  int64_t validate_every = 100;
  int64_t validation_batches = 16;

  // --- length ---
  int64_t steps = 500;
  int64_t tokens = 0;  // 0: `steps` counts
  double epochs = 0;   // 0: the two above count; plan_run() sets `steps` by it

  // --- optimizer ---
  OptimizerChoice optimizer = OptimizerChoice::kAdamW;
  double lr = 4e-3;
  RateSchedule schedule = RateSchedule::kCosine;
  std::optional<int64_t> warmup = std::nullopt;  // nullopt: a tenth of the steps, at most 1000
  std::optional<double> min_lr = std::nullopt;   // nullopt: a tenth of `lr`
  int64_t decay_steps = 0;                       // wsd
  RateDecay decay = RateDecay::kLinear;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  bool decay_vectors = false;
  std::vector<ParameterRule> rules;
  double momentum = 0.9;
  bool nesterov = false;
  double muon_momentum = 0.95;
  MuonScaleChoice muon_scale = MuonScaleChoice::kMatchAdamW;
  double adamw_rate = 1.0;               // Muon: AdamW's rate, relative to `lr`
  std::vector<std::string> muon_except;  // matrices that AdamW updates
  double clip = 1.0;                     // 0: none
  NonfiniteChoice on_nonfinite = NonfiniteChoice::kSkip;
  double loss_scale = 1.0;
  bool dynamic_loss_scale = false;
  UpdatesChoice updates = UpdatesChoice::kHidden;
  Rounding rounding = Rounding::kNearest;

  // --- sharding ---
  int64_t ranks = 0;  // as threads of this process; 0: one, or as many as the launcher started
  int64_t outer = 1;
  int64_t ep = 1;
  int64_t tp = 1;
  double expert_capacity = 0.0;
  Strategy strategy = Strategy::optim_grads_params;
  PrecisionTypes precision = {};
  PoolKind pool = PoolKind::kPlanned;
  int64_t prefetch = 1;
  int64_t pool_budget_bytes = 0;
  OnMove on_move = OnMove::kFollow;
  OtherUnits other_units = OtherUnits::kOnDemand;
  UserBuffers user_buffers = UserBuffers::kOff;
  LifetimeChoice gradient_lifetime = LifetimeChoice::kPersistent;
  Granularity granularity = Granularity::element();
  double offload = 0.0;
  bool offload_pin = true;
  bool offload_overlap = true;
  int64_t offload_chunk = 1 << 20;

  // --- machine ---
  DeviceChoice device = DeviceChoice::kAuto;
  bool cuda_graph = false;
  int64_t threads = 0;  // of each rank on a CPU; 0: the cores, shared evenly
  bool checked = false;
  bool name_nan = false;
  double timeout = 600.0;
  uint64_t seed = 1;
  bool deterministic = false;

  // --- checkpoints ---
  std::string checkpoint_dir;      // "": none
  int64_t checkpoint_every = 100;  // 0: at the end alone
  int64_t keep_last = 2;
  int64_t keep_every = 0;
  SaveChoice save = SaveChoice::kBackground;
  std::optional<DType> checkpoint_dtype = std::nullopt;
  int64_t write_chunk_bytes = int64_t{16} << 20;
  int64_t load_chunk_bytes = int64_t{64} << 20;
  int64_t read_threads = 0;
  std::string resume = "auto";  // auto, never or a path
  bool restart_data = false;
  std::vector<std::string> allow_missing;
  bool allow_extra = false;
  std::string export_dir;    // "": none
  int64_t export_every = 0;  // 0: at the end alone
  std::string patches;       // where patches of the weights are written; "": none
  int64_t patch_every = 1;   // steps
  PatchNamesChoice patch_names = PatchNamesChoice::kHf;
  int64_t keep_patches = 0;  // 0: all

  // --- what is seen ---
  std::string log = "auto";  // a path; auto: in the checkpoint directory; none
  std::string tensorboard;
  std::string report = "auto";  // the same
  std::string trace;            // a path; "": none
  StepRange trace_steps = {3, 5};
  int64_t log_every = 0;  // 0: every step of a short run, else now and then
  std::string sample = "The ";
  int64_t sample_tokens = 200;
  // Peak of one rank's device; nullopt: by its name; 0: unknown.
  std::optional<double> peak_tflops = std::nullopt;
  bool quiet = false;

  // Checks the fields against each other for this many ranks, before anything is opened. Throws a
  // UsageError with the flags, their values and the fix.
  void validate(int64_t num_ranks) const;

  // From `tokens` or `steps`; by `epochs` once plan_run() knows the data.
  int64_t total_steps() const;
  int64_t tokens_per_step() const { return batch * sequence; }
  // Ranks of a tp group have the same sequences.
  int64_t num_losses(int64_t num_ranks) const { return num_ranks / tp; }
  // Sequences that a rank computes at a time. UsageError for a batch that ranks cannot share.
  int64_t rows_of_rank(int64_t num_ranks) const;

  // With defaults filled in.
  LearningRateOptions rate_options() const;

  // With every default filled in, for display.
  TrainOptions resolved(int64_t num_ranks, const RankDevice& found) const;

  // The resolved paths; "": none.
  std::string log_path() const;
  std::string report_path() const;
};

}  // namespace fsdp::train
