#include "fsdp/nn/layers/cross_entropy.h"

#include <ATen/ATen.h>

#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

namespace {

// The base is the target's logit, or the first one where the target is no column: then the
// logarithm is minus a log-probability, and the gap 0.
at::Tensor rows_by_aten(RowWork work, const LogitRows& rows) {
  const at::Tensor is_target = rows.targets.ne(kNoTarget);
  const at::Tensor column = rows.targets - rows.first_token;
  const at::Tensor is_column = column.ge(0).logical_and_(column.lt(rows.logits.size(1)));
  const at::Tensor is_token = rows.targets.ge(0).logical_and_(rows.targets.lt(rows.vocabulary));
  // Anything else is out of bounds, and gather() says so.
  const at::Tensor is_elsewhere =
      is_token.logical_and(is_column.logical_not()).logical_or_(is_target.logical_not());
  const at::Tensor index = column.masked_fill(is_elsewhere, 0).unsqueeze(1);
  at::Tensor log_probability;
  if (work == RowWork::kGradient) {
    log_probability = rows.logits.to(at::kFloat).sub_(rows.sums[0].unsqueeze(1));
    log_probability.sub_(rows.sums[1].unsqueeze(1));
  } else {
    log_probability = at::log_softmax(rows.logits, 1, at::kFloat);
    rows.sums[0].copy_(rows.logits.gather(1, index).squeeze(1));
    rows.sums[1].copy_(log_probability.gather(1, index).squeeze(1).neg_());
    rows.sums[2].zero_();
  }
  if (work == RowWork::kSums) return {};
  const at::Tensor one = is_column.to(at::kFloat).unsqueeze(1);
  log_probability.exp_().mul_(is_target.unsqueeze(1)).scatter_add_(1, index, one.neg());
  return log_probability.to(rows.logits.scalar_type());
}

at::Tensor rows_by_kernel(RowWork work, const LogitRows& rows) {
  const OnDeviceOf on_device(rows.logits);
  cross_entropy_rows_on_device(work,
                               {.dtype = dtype_of(rows.logits.scalar_type()),
                                .num_rows = rows.logits.size(0),
                                .num_columns = rows.logits.size(1),
                                .logits = rows.logits.mutable_data_ptr(),
                                .targets = rows.targets.const_data_ptr<int64_t>(),
                                .first_token = rows.first_token,
                                .vocabulary = rows.vocabulary,
                                .sums = rows.sums.mutable_data_ptr<float>(),
                                .sums_stride = rows.sums.stride(0)},
                               on_device.stream());
  return work == RowWork::kSums ? at::Tensor() : rows.logits;
}

}  // namespace

at::Tensor cross_entropy_rows(RowWork work, const LogitRows& rows) {
  return has_kernels(rows.logits) ? rows_by_kernel(work, rows) : rows_by_aten(work, rows);
}

MeanLoss mean_cross_entropy(const at::Tensor& sums, const at::Tensor& targets,
                            const at::Tensor& all_targets) {
  if (!has_kernels(sums)) {
    const at::Tensor losses = (sums[1] + sums[2]).masked_fill_(targets.eq(kNoTarget), 0.0);
    const at::Tensor count = all_targets.ne(kNoTarget).sum().clamp_min(1).to(at::kDouble);
    return {(losses.sum(at::kDouble) / count).to(at::kFloat), count.reciprocal().to(at::kFloat)};
  }
  MeanLoss mean{at::empty({}, sums.options()), at::empty({}, sums.options())};
  const OnDeviceOf on_device(sums);
  cross_entropy_mean_on_device({.num_rows = sums.size(1),
                                .targets = targets.const_data_ptr<int64_t>(),
                                .sums = sums.const_data_ptr<float>(),
                                .num_all = all_targets.numel(),
                                .all_targets = all_targets.const_data_ptr<int64_t>()},
                               mean.weight.mutable_data_ptr<float>(),
                               mean.loss.mutable_data_ptr<float>(), on_device.stream());
  return mean;
}

}  // namespace fsdp::nn
