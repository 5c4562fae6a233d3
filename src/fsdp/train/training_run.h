// One rank's part of a training run: from building the model to the last checkpoint.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/world.h"
#include "fsdp/data/batch_loader.h"
#include "fsdp/graph/graph.h"
#include "fsdp/nn/language_model.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/shard/sharded.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/run_data.h"
#include "fsdp/train/run_plan.h"
#include "fsdp/train/run_trace.h"
#include "fsdp/train/run_watch.h"
#include "fsdp/train/stop_request.h"
#include "fsdp/train/weights_out.h"

namespace fsdp::train {

// All ranks construct and call it alike. Only rank 0 prints.
class TrainingRun {
 public:
  // Builds and shards the model, and loads its weights and state.
  TrainingRun(const RunPlan& plan, World& world, const StopRequest& stop, std::ostream& out);
  ~TrainingRun();

  // Trains until the last step, or the one in which a signal came. Returns the signal, or 0.
  int train();

 private:
  struct Metrics;  // the figures that ranks combine after a step

  CheckpointState state() const;
  void load_init(LoadOptions loading);
  void load();
  void begin_watch(std::ostream& out);
  void forward_and_backward();
  void update();
  Metrics step();
  void record(const Metrics& metrics, double seconds);
  void validate();
  void save();
  void export_weights();
  void report_saved();
  int train_steps();
  void end_trace();
  void end(int signal);
  void write_sample();
  void report_end(const std::string& stopped_by);
  bool is_due(int64_t every) const { return every > 0 && step_ % every == 0; }
  std::string text_of_epochs() const;

  RunPlan plan_;
  const TrainOptions& options_ = plan_.options;
  World& world_;
  const StopRequest& stop_;
  const Mesh mesh_;
  const c10::Device device_;
  const int64_t total_steps_;
  PublishedModel published_;  // rank 0 only, where something is written

  std::shared_ptr<LanguageModel> model_;
  std::optional<Sharded> sharded_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::optional<WeightsOut> weights_out_;
  std::unique_ptr<BatchLoader> loader_;
  std::unique_ptr<Graph> graph_;  // with --cuda-graph
  std::unique_ptr<ValidationBatches> validation_;
  std::unique_ptr<RunWatch> watch_;  // rank 0 only
  std::unique_ptr<RunTrace> trace_;  // with --trace

  StepBatches batches_;
  std::vector<std::string> loss_names_;  // "loss" and its terms
  at::Tensor losses_;                    // the same, summed over microbatches

  int64_t step_ = 0;         // done so far
  int64_t first_step_ = 0;   // done before this process
  int64_t saved_step_ = -1;  // the last step whose checkpoint was begun
  int64_t validated_step_ = -1;
  double blocked_ms_ = 0;    // how long the last save blocked
  int64_t num_skipped_ = 0;  // in a row
  double overhead_ = 0;      // seconds of this step that StepRecord counts as overhead
  double started_ = 0;       // seconds on the steady clock
};

}  // namespace fsdp::train
