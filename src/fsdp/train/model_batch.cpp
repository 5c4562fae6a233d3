#include "fsdp/train/model_batch.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "fsdp/base/error.h"

namespace fsdp::train {

ModelBatch to_model_batch(const TokenBatch& batch, c10::Device device) {
  const at::Tensor rows =
      at::tensor(batch.tokens, at::kLong).view({batch.rows, batch.columns}).to(device);
  return {rows.slice(1, 0, batch.columns - 1), rows.slice(1, 1, batch.columns)};
}

double mean_loss(LanguageModel& model, const ValidationBatches& batches, c10::Device device,
                 Communicator& all) {
  FSDP_ASSERT(batches.num_batches() > 0);
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (int64_t i = 0; i < batches.num_batches(); ++i) {
    const ModelBatch batch = to_model_batch(batches.read(i), device);
    // The first term is the cross entropy, without what only helps training.
    sum += model.loss(batch.tokens, batch.targets).terms.front().value.to(at::kDouble);
  }
  all.all_reduce(sum, {.op = ReduceOp::kAvg}, "mean loss").wait();
  return sum.item<double>() / static_cast<double>(batches.num_batches());
}

}  // namespace fsdp::train
