// The batches that a rank computes in a step, one for each microbatch, and their shares in its
// loss.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/data/batch_loader.h"
#include "fsdp/train/model/trained_model.h"

namespace fsdp::train {

enum class BatchMemory : uint8_t {
  kNew,   // in every step
  kSame,  // of the first step: a recorded step reads its batches where they were then
};

class StepBatches {
 public:
  // `all` connects all ranks and must outlive it.
  StepBatches(int64_t microbatches, BatchMemory memory, c10::Device device, Communicator& all);

  // Those of the next step. All ranks call it.
  void load(BatchLoader& loader);

  int64_t size() const { return static_cast<int64_t>(batches_.size()); }
  const ModelBatch& operator[](int64_t part) const { return batches_[static_cast<size_t>(part)]; }

  // What a microbatch's loss is multiplied with, on the device; undefined: all count alike.
  at::Tensor share(int64_t part) const { return shares_.defined() ? shares_[part] : at::Tensor(); }

 private:
  void share_loss(const std::vector<double>& num_targets);

  const BatchMemory memory_;
  const c10::Device device_;
  Communicator& all_;
  std::vector<ModelBatch> batches_;
  at::Tensor shares_;
};

}  // namespace fsdp::train
