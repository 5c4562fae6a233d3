// The data of a run: opened and checked before anything trains, compared between ranks, and cut
// into the batches of each step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/data/batch_loader.h"
#include "fsdp/data/batches.h"
#include "fsdp/train/model/trained_model.h"
#include "fsdp/train/run_plan.h"

namespace fsdp::train {

// --- before anything trains ----------------------------------------------------------------------

// Opens --data and --validation-data, and makes --sample tokens where a tokenizer of the data's
// tokens is at hand. Needs the plan's options, model and init.
void open_data(RunPlan& plan, const DataOpening& opening);

// Says which rows go another way than a person may expect.
void warn_of_rows(const RunPlan& plan);

// The windows of the run's data; UsageError where it is too short for them.
DataSplit split_data(const RunPlan& plan);

// Answers for --documents auto: rows of prompts and answers, which have loss masks, know nothing of
// each other.
WindowDocuments window_documents(std::optional<WindowDocuments> choice, const Corpus& corpus);

// UsageError for documents that are separate but have no ends, and for those in a recorded step.
void check_documents(const RunPlan& plan);

// --- between ranks -------------------------------------------------------------------------------

// Catches hosts that have different files under the same name, by their headers. All ranks throw if
// one differs from rank 0.
void compare_data(const RunPlan& plan, const Mesh& mesh);

// Waits until every rank has verified its own copy, and so that they are equal. All ranks throw if
// one is damaged. Comes before anything is published that was trained on it.
void confirm_data(const RunPlan& plan, const Mesh& mesh);

// --- in a step -----------------------------------------------------------------------------------

enum class BatchMemory : uint8_t {
  kNew,   // in every step
  kSame,  // of the first step: a recorded step reads its batches where they were then
};

// The batches that a rank computes in a step, one for each microbatch, and their shares in its
// loss.
class StepBatches {
 public:
  // `all` connects all ranks and must outlive it.
  StepBatches(int64_t microbatches, BatchMemory memory, c10::Device device, Communicator& all);

  // Those of the next step. All ranks call it.
  void load(BatchLoader& loader);

  // Whether any rank has a token to learn; all ranks know the same.
  bool have_targets() const { return have_targets_; }

  int64_t size() const { return static_cast<int64_t>(batches_.size()); }
  const ModelBatch& operator[](int64_t part) const { return batches_[static_cast<size_t>(part)]; }

  // The factor of a microbatch's loss, on the device; undefined: all count alike.
  at::Tensor share(int64_t part) const { return shares_.defined() ? shares_[part] : at::Tensor(); }

 private:
  void share_loss(const std::vector<double>& num_targets);

  const BatchMemory memory_;
  const c10::Device device_;
  Communicator& all_;
  std::vector<ModelBatch> batches_;
  at::Tensor shares_;
  bool have_targets_ = true;
};

}  // namespace fsdp::train
