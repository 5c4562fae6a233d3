// The plan that all ranks of a run share: made once per process, before anything trains.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/corpus.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/forecast.h"
#include "fsdp/plan/peak_forecast.h"
#include "fsdp/train/log/run_records.h"
#include "fsdp/train/model/adapters.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp::train {

// A longer file is not taken for a config.json.
inline constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// A model that can be trained, as --model names it.
struct NamedModel {
  std::string name;  // "tiny", or the path of its config.json
  ModelConfig config;
};

// A preset, a config.json, or a directory with one. UsageError with the nearest preset.
NamedModel find_model(const std::string& name_or_path);

// Weights to begin with; "": random ones. A person who names a directory of weights as the model
// wants its weights, too.
std::string init_of(const TrainOptions& options);

// The engine's options as planning has them (run_options.h has the rest), and what a step computes.
PlanOptions plan_options(const TrainOptions& options, int64_t num_ranks, DType compute);
PeakOptions peak_options(const TrainOptions& options, int64_t num_ranks);

struct RunPlan {
  TrainOptions given;     // by a person
  TrainOptions options;   // the same, with what the weights and the data decide
  TrainOptions resolved;  // as shown
  int64_t num_ranks = 1;
  DType compute = DType::kFloat32;
  NamedModel model;
  std::string model_config;  // config.json in our own words (published_model.h has the original)
  std::string init;          // weights to begin with, without a checkpoint to resume; "": random
  // Adapters to begin with, where --init names such: `init` is then their base. "": new ones.
  std::string init_adapters = {};
  std::optional<AdapterDescription> adapters = std::nullopt;  // with --lora, on the weights of init
  int64_t adapter_parameters = 0;
  std::string tokenizer;    // of the data: "bytes", or a tokenizer.json; "": not known
  std::string sample = {};  // that a sample begins with, or the question of a chat
  std::vector<int64_t> sample_prompt = {};  // the same as tokens; empty: no sample
  std::vector<int64_t> end_tokens = {};     // that end a sample
  std::string no_sample = {};               // why there is none, though one is wanted
  std::string sequence_reason = {};         // of a chosen --sequence; "": none worth a word
  std::shared_ptr<const Corpus> corpus;
  std::shared_ptr<const Corpus> validation;  // null: a part of `corpus`
  std::shared_ptr<const CorpusCheck> data_check = nullptr;
  std::optional<DataSplit> windows = std::nullopt;
  Forecast forecast;
  std::optional<PeakForecast> peak = std::nullopt;  // of a step on a GPU, if it is known
};

// Told which data are tokenised, and how many bytes of how many are done.
using DataProgress =
    std::function<void(const std::string& what, int64_t done_bytes, int64_t total_bytes)>;

struct DataOpening {
  DataProgress progress = {};
  bool keeps_tokens = true;       // beside the run, where it has a directory
  Communicator* ranks = nullptr;  // the processes of the run; null: this one alone
  int local_rank = 0;
};

// Opens the data, checks all settings against each other, and forecasts memory. UsageError or Error
// in one sentence.
RunPlan plan_run(const TrainOptions& options, int64_t num_ranks, const RankDevice& device,
                 const DataOpening& opening = {});

// The forecast as rows, to which measured values can be added later.
std::vector<MemoryRow> memory_rows(const Forecast& forecast);

// "tiny: 1.8 M parameters in 8 units, on 2 ranks", with --lora
// "base/config.json: 1.8 M parameters, 0.1 M of them trained, in 6 units on 1 rank"
std::string title_of(const RunPlan& plan);

// "500 steps of 1,024 tokens: 512,000 tokens in all"
std::string length_text(const TrainOptions& options);

// Says what a run begins with, and what was chosen by it:
// "fine-tuning the weights of DIR: --lr 2e-05,
// --validate-every 50, because weights are loaded (--init none: random ones)",
// "training adapters (LoRA) of rank 16 on the weights of DIR: ..., because adapters are trained".
std::string beginning_text(const RunPlan& plan);

// The directory of a run for which nobody names one: "runs/tiny-20261119-101530".
std::string dated_directory(const RunPlan& plan, int64_t time);

// Makes it, and returns its time: now, or a later one where there is a directory already.
int64_t make_dated_directory(const RunPlan& plan);

// Where the run's checkpoints, log and report are.
void place_run(RunPlan& plan, const std::string& directory);

}  // namespace fsdp::train
