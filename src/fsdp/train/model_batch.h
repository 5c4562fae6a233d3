// Tokens as the tensors that a model takes, and the loss of many batches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "fsdp/comm/communicator.h"
#include "fsdp/data/batches.h"
#include "fsdp/nn/language_model.h"

namespace fsdp::train {

// [rows, sequence] each.
struct ModelBatch {
  at::Tensor tokens;
  at::Tensor targets;  // what follows each token
};

ModelBatch to_model_batch(const TokenBatch& batch, c10::Device device);

// The cross entropy per token over all batches and ranks, which call it alike; no gradients.
double mean_loss(LanguageModel& model, const ValidationBatches& batches, c10::Device device,
                 Communicator& all);

}  // namespace fsdp::train
