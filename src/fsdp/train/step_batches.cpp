#include "fsdp/train/step_batches.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

namespace fsdp::train {

StepBatches::StepBatches(int64_t microbatches, BatchMemory memory, c10::Device device,
                         Communicator& all)
    : memory_(memory), device_(device), all_(all), batches_(static_cast<size_t>(microbatches)) {}

void StepBatches::load(BatchLoader& loader) {
  RECORD_FUNCTION("fsdp::load_batches", {});
  std::vector<double> num_targets;
  for (ModelBatch& batch : batches_) {
    const TokenBatch read = loader.next();
    num_targets.push_back(static_cast<double>(read.num_targets));
    const ModelBatch next = to_model_batch(read, device_);
    if (memory_ == BatchMemory::kSame && batch.tokens.defined()) {
      batch.tokens.copy_(next.tokens);
      batch.targets.copy_(next.targets);
    } else {
      batch = next;
    }
  }
  if (loader.has_unlike_targets()) share_loss(num_targets);
}

// The step's loss is the mean over all its targets. The engine takes the mean over ranks, so a
// microbatch's share is its targets, divided by those of a mean rank. The sum stays on the device:
// the host need not wait for it.
void StepBatches::share_loss(const std::vector<double>& num_targets) {
  const at::Tensor counts = at::tensor(num_targets, at::kDouble).to(device_);
  const at::Tensor of_mean_rank = counts.sum().view({1});
  all_.all_reduce(of_mean_rank, {.op = ReduceOp::kAvg}, "targets").wait();
  // Without any target all losses are 0, and so are their shares.
  const at::Tensor shares = (counts / of_mean_rank.clamp_min(1e-6)).to(at::kFloat);
  shares_ = shares_.defined() ? shares_.copy_(shares) : shares;
}

}  // namespace fsdp::train
