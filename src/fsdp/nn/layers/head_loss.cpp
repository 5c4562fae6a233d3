#include "fsdp/nn/layers/head_loss.h"
#include "fsdp/nn/layers/rank_slices.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/kernels/kernel_calls.h"
#include "fsdp/nn/layers/tensor_ranks.h"
#include "fsdp/nn/layers/weight_products.h"

namespace fsdp::nn {

// --- cross entropy of rows of logits -------------------------------------------------------------

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

// --- head and loss -------------------------------------------------------------------------------

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Narrow types are summed in fp32.
at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type;
}

// A call works on these: all rows that this rank computes, and what becomes of them.
struct HeadRows {
  at::Tensor hidden = {};           // [rows, hidden size]
  at::Tensor weight = {};           // [columns, hidden size]
  at::Tensor targets = {};          // [rows]
  at::Tensor sums = {};             // [kRowSums, rows]
  at::Tensor hidden_gradient = {};  // of the sum of all rows' losses; undefined: not wanted
  at::Tensor weight_gradient = {};  // the same
};

// From sums over the tokens of this rank to those over the tokens of all.
void join_sums(const LogitRows& rows, const MeshAxis& tp) {
  const at::Tensor& sums = rows.sums;
  const at::Tensor most = sums[0] + sums[1];
  tp.gather().all_reduce(most, {.op = ReduceOp::kMax}, "largest sums of exponentials").wait();
  const at::Tensor base = sums[0] - most;
  const at::Tensor column = rows.targets - rows.first_token;
  const at::Tensor is_absent = column.lt(0).logical_or_(column.ge(rows.logits.size(1)));
  const at::Tensor parts =
      at::stack({(base + sums[1]).exp_(), (sums[2] - base).masked_fill_(is_absent, 0.0)});
  tp.gather().all_reduce(parts, {}, "sums of exponentials").wait();
  sums[0].copy_(most);
  sums[1].copy_(parts[0].log());
  sums[2].copy_(parts[1]);
}

// The gradient of the sum of the rows' losses, or undefined if it is not wanted.
at::Tensor logit_gradient(const LogitRows& rows, bool is_wanted, const MeshAxis* tp) {
  if (tp == nullptr) return cross_entropy_rows(is_wanted ? RowWork::kBoth : RowWork::kSums, rows);
  cross_entropy_rows(RowWork::kSums, rows);
  join_sums(rows, *tp);
  return is_wanted ? cross_entropy_rows(RowWork::kGradient, rows) : at::Tensor();
}

// The logits that count, and their slopes where there is a cap: both in their type.
struct CappedLogits {
  at::Tensor values;
  at::Tensor slopes = {};

  CappedLogits(at::Tensor logits, double cap, bool has_gradient) : values(std::move(logits)) {
    if (cap == 0) return;
    values.div_(cap).tanh_();
    if (has_gradient) slopes = values.square().neg_().add_(1);
    values.mul_(cap);
  }
};

// `tp`: ranks that share the vocabulary.
void compute_chunk(const HeadRows& all, int64_t begin, int64_t end, double soft_cap,
                   const MeshAxis* tp) {
  const int64_t count = end - begin;
  const int64_t columns = all.weight.size(0);
  const at::Tensor hidden = all.hidden.narrow(0, begin, count);
  const bool is_wanted = all.hidden_gradient.defined() || all.weight_gradient.defined();
  const CappedLogits logits(at::mm(hidden, all.weight.t()), soft_cap, is_wanted);
  const at::Tensor gradient =
      logit_gradient({.logits = logits.values,
                      .targets = all.targets.narrow(0, begin, count),
                      .sums = all.sums.narrow(1, begin, count),
                      .first_token = tp == nullptr ? 0 : tp->rank() * columns,
                      .vocabulary = tp == nullptr ? columns : tp->size() * columns},
                     is_wanted, tp);
  if (is_wanted && logits.slopes.defined()) gradient.mul_(logits.slopes);
  if (all.hidden_gradient.defined()) {
    at::Tensor to = all.hidden_gradient.narrow(0, begin, count);
    at::mm_out(to, gradient, all.weight);
  }
  if (all.weight_gradient.defined())
    write_product(all.weight_gradient, gradient.t(), hidden,
                  begin == 0 ? ProductUse::kStored : ProductUse::kAdded);
}

HeadRows prepared(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                  const WantedGradients& wanted) {
  HeadRows rows{
      .hidden = rows_of(hidden), .weight = weight, .targets = targets.reshape({-1}).contiguous()};
  const auto numbers = hidden.options().requires_grad(false);
  rows.sums = at::empty({kRowSums, rows.targets.size(0)}, numbers.dtype(at::kFloat));
  if (wanted.of_hidden) rows.hidden_gradient = at::empty(rows.hidden.sizes(), numbers);
  if (wanted.of_weight) {
    const auto sums = numbers.dtype(sum_type(weight.scalar_type()));
    rows.weight_gradient = rows.targets.numel() > 0 ? at::empty(weight.sizes(), sums)
                                                    : at::zeros(weight.sizes(), sums);
  }
  return rows;
}

}  // namespace

HeadLossParts head_loss_parts(const at::Tensor& own_hidden, const at::Tensor& weight,
                              const at::Tensor& all_targets, const HeadLossOptions& options,
                              const WantedGradients& wanted) {
  const MeshAxis* tp = options.ranks.tp;
  const MeshAxis* sharing = options.ranks.part == LogitPart::kVocabulary ? tp : nullptr;
  const at::Tensor hidden =
      sharing == nullptr ? own_hidden : GatheredSlices(own_hidden, 1, tp->gather()).wait();
  const at::Tensor targets = sharing == nullptr ? own_sequence(all_targets, tp) : all_targets;
  const HeadRows rows = prepared(hidden, weight, targets, wanted);
  const int64_t num_rows = rows.targets.size(0);
  const int64_t step = rows_of_logit_chunk(
      {num_rows, weight.size(0), static_cast<int64_t>(hidden.element_size())}, options.logit_bytes);
  for (int64_t begin = 0; begin < num_rows; begin += step)
    compute_chunk(rows, begin, std::min(begin + step, num_rows), options.soft_cap, sharing);

  HeadLossParts result{
      .mean = mean_cross_entropy(rows.sums, rows.targets, all_targets.reshape({-1}).contiguous()),
      .hidden_gradient = rows.hidden_gradient,
      .weight_gradient = rows.weight_gradient};
  if (tp != nullptr && sharing == nullptr)
    tp->gather().all_reduce(result.mean.loss, {}, "parts of the loss").wait();
  if (wanted.of_hidden) result.hidden_gradient = result.hidden_gradient.view(hidden.sizes());
  if (wanted.of_hidden && sharing != nullptr)
    result.hidden_gradient = ScatteredSums(result.hidden_gradient, 1, tp->gather()).wait();
  return result;
}

namespace {

class HeadLoss final : public torch::autograd::Function<HeadLoss> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            const HeadLossOptions& options, const WantedGradients& wanted) {
    HeadLossParts result = head_loss_parts(hidden, weight, targets, options, wanted);
    // The weight is saved for its name alone, which says where its gradient goes.
    context->save_for_backward(
        {weight, result.mean.weight, result.hidden_gradient, result.weight_gradient});
    return result.mean.loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    // A dim, so that products with it are computed in fp32 whatever the other's type.
    const at::Tensor factor = (saved[1] * gradients[0]).view({1});
    variable_list result(5);
    if (saved[2].defined() && context->needs_input_grad(0)) {
      result[0] = at::empty_like(saved[2]);
      at::mul_out(result[0], saved[2], factor);
    }
    if (saved[3].defined() && context->needs_input_grad(1)) {
      WeightGradient gradient(saved[0]);
      gradient.write(saved[3], factor);
      result[1] = gradient.for_autograd();
    }
    return result;
  }
};

}  // namespace

at::Tensor head_loss(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                     const HeadLossOptions& options) {
  const WantedGradients wanted{.of_hidden = at::GradMode::is_enabled() && hidden.requires_grad(),
                               .of_weight = at::GradMode::is_enabled() && weight.requires_grad()};
  if (!wanted.any()) return head_loss_parts(hidden, weight, targets, options, wanted).mean.loss;
  return HeadLoss::apply(hidden, weight, targets, options, wanted);
}

}  // namespace fsdp::nn
