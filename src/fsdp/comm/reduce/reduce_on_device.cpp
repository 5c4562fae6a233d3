#include "fsdp/comm/reduce/reduce_ranks.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/comm/reduce/sum_on_device.h"

namespace fsdp {

namespace {

at::Tensor combine(const at::Tensor& acc, const at::Tensor& value, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return at::add(acc, value);
    case ReduceOp::kMax:
      return at::maximum(acc, value);
    case ReduceOp::kMin:
      return at::minimum(acc, value);
  }
  return acc;
}

// Rounds as reduce_ranks does: fp64 reaches a narrow type through fp32 rounded to odd, so that it
// is rounded once.
at::Tensor rounded(const at::Tensor& acc, at::ScalarType result) {
  const bool narrow = result == at::kBFloat16 || result == at::kHalf;
  if (acc.scalar_type() != at::kDouble || !narrow) return acc.to(result);
  const at::Tensor near = acc.to(at::kFloat);
  const at::Tensor back = near.to(at::kDouble);
  const at::Tensor is_even = near.view(at::kInt).bitwise_and(1).eq(0);
  const at::Tensor towards = at::where(back.lt(acc), INFINITY, -INFINITY).to(at::kFloat);
  return at::where(is_even.logical_and_(back.ne(acc)), at::nextafter(near, towards), near)
      .to(result);
}

// Atomic on the device, since operations on several streams may share one flag.
void watch(const at::Tensor& flag, const at::Tensor& stored) {
  const at::Tensor bad = stored.isfinite().all().logical_not().to(at::kFloat).view(1);
  const at::Tensor place = at::zeros({1}, flag.options().dtype(at::kLong));
  flag.view(-1).scatter_reduce_(0, place, bad, "amax");
}

at::Tensor combined(std::span<const at::Tensor> inputs, at::ScalarType acc, ReduceOp op) {
  if (inputs.size() == 1) return inputs.front().to(acc);
  const size_t left = SumOrder::left_of(inputs.size());
  return combine(combined(inputs.first(left), acc, op), combined(inputs.subspan(left), acc, op),
                 op);
}

// Combine in the accumulation type, scale once, add to the output where asked, round once.
void reduce_step_by_step(std::span<const at::Tensor> inputs, const Reduction& reduction,
                         const at::Tensor& output) {
  const at::ScalarType acc_type = *reduction.accumulate;
  at::Tensor acc = combined(inputs, acc_type, reduction.op);
  const double scale = scale_of(reduction, inputs.size());
  // A float factor, as on the host: a double one would be rounded differently by some kernels.
  if (scale != 1.0)
    acc = acc_type == at::kDouble ? acc * scale
                                  : acc * static_cast<double>(static_cast<float>(scale));
  const at::Tensor flat = output.view(-1);
  if (reduction.store == Store::kAdd) acc = flat.to(acc_type) + acc;
  flat.copy_(rounded(acc, flat.scalar_type()), /*non_blocking=*/true);
  if (reduction.nonfinite.defined() && at::isFloatingType(flat.scalar_type()))
    watch(reduction.nonfinite, flat);
  if (reduction.squares.defined()) reduction.squares.add_(flat.to(at::kDouble).square_().sum());
}

// The bytes between one input and the next where they all lie as far apart; 0 where they do not.
int64_t stride_of(std::span<const void* const> inputs) {
  const auto address = [&](size_t rank) { return static_cast<const char*>(inputs[rank]); };
  if (inputs.size() < 2) return 0;
  const int64_t stride = address(1) - address(0);
  for (size_t rank = 2; rank < inputs.size(); ++rank)
    if (address(rank) - address(rank - 1) != stride) return 0;
  return stride;
}

bool is_one_kernel(std::span<const void* const> inputs, at::ScalarType wire,
                   const Reduction& reduction, const at::Tensor& output) {
  const auto is_summed = [](at::ScalarType type) {
    return at::isFloatingType(type) && is_summed_on_device(dtype_of(type));
  };
  return output.is_cuda() && (inputs.size() <= DeviceSum::kMaxListed || stride_of(inputs) != 0) &&
         (reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg) &&
         reduction.accumulate == at::kFloat && is_summed(wire) && is_summed(output.scalar_type());
}

template <typename Number>
void sum_rows(const at::Tensor& rows, double scale, const SumOrder& order,
              const at::Tensor& output) {
  sum_rows_on_device(RowSum<Number>{.rows = rows.const_data_ptr<Number>(),
                                    .numel = output.numel(),
                                    .ranks = order.ranks,
                                    .group = order.group,
                                    .scale = static_cast<Number>(scale),
                                    .sum = output.mutable_data_ptr<Number>()},
                     current_stream(output.device()).native_handle());
}

// The inputs as rows of one tensor, where they lie one after the other; undefined where not.
at::Tensor rows_of(std::span<const at::Tensor> inputs) {
  const at::Tensor& first = inputs.front();
  for (size_t rank = 1; rank < inputs.size(); ++rank)
    if (static_cast<const char*>(inputs[rank].const_data_ptr()) !=
        static_cast<const char*>(first.const_data_ptr()) + rank * first.nbytes())
      return {};
  return at::for_blob(first.data_ptr(), {std::ssize(inputs), first.numel()})
      .options(first.options())
      .target_device(first.device())
      .make_tensor();
}

// In a launch or two, however many rows there are; false, and nothing is enqueued, where that
// cannot be.
bool reduce_rows(const at::Tensor& rows, const Reduction& reduction, const SumOrder& order,
                 const at::Tensor& output) {
  if (reduction.store != Store::kWrite || reduction.nonfinite.defined() ||
      reduction.squares.defined())
    return false;
  const at::ScalarType type = output.scalar_type();
  const bool is_sum = reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg;
  const double scale = scale_of(reduction, static_cast<size_t>(order.ranks));
  if (!is_sum && scale == 1.0) {  // in libtorch, too, NaN wins
    const at::Tensor found = reduction.op == ReduceOp::kMax ? at::amax(rows, 0) : at::amin(rows, 0);
    output.view(-1).copy_(found, /*non_blocking=*/true);
    return true;
  }
  if (is_sum && !at::isFloatingType(rows.scalar_type())) {  // exact in any order
    output.view(-1).copy_(at::sum(rows, 0, /*keepdim=*/false, at::kLong), /*non_blocking=*/true);
    return true;
  }
  const bool is_plain =
      is_sum && output.is_cuda() && rows.scalar_type() == type && reduction.accumulate == type;
  if (is_plain && type == at::kFloat) sum_rows<float>(rows, scale, order, output);
  if (is_plain && type == at::kDouble) sum_rows<double>(rows, scale, order, output);
  return is_plain && (type == at::kFloat || type == at::kDouble);
}

}  // namespace

void reduce_rows_on_device(const at::Tensor& rows, const Reduction& reduction,
                           const SumOrder& order, const at::Tensor& output, at::Tensor& workspace) {
  if (reduce_rows(rows, reduction, order, output)) return;
  const std::vector<at::Tensor> inputs = rows.unbind(0);
  reduce_on_device(inputs, reduction, output, workspace, static_cast<size_t>(order.group));
}

bool reduce_in_one_kernel(std::span<const void* const> inputs, at::ScalarType wire,
                          const Reduction& reduction, const at::Tensor& output,
                          at::Tensor& workspace) {
  if (!is_one_kernel(inputs, wire, reduction, output)) return false;
  if (reduction.squares.defined() && !workspace.defined())
    workspace = at::zeros({device_sum_workspace_bytes()}, output.options().dtype(at::kByte));
  DeviceSum sum{.num_ranks = static_cast<int32_t>(inputs.size()),
                .output = output.mutable_data_ptr(),
                .numel = output.numel(),
                .wire = dtype_of(wire),
                .result = dtype_of(output.scalar_type()),
                .scale = static_cast<float>(scale_of(reduction, inputs.size())),
                .adds = reduction.store == Store::kAdd};
  if (inputs.size() > DeviceSum::kMaxListed) {
    sum.first = inputs.front();
    sum.stride_bytes = stride_of(inputs);
  } else {
    std::copy(inputs.begin(), inputs.end(), sum.listed);
  }
  if (reduction.nonfinite.defined()) sum.nonfinite = reduction.nonfinite.mutable_data_ptr<float>();
  if (reduction.squares.defined()) {
    sum.squares = reduction.squares.mutable_data_ptr<double>();
    sum.workspace = workspace.mutable_data_ptr();
  }
  sum_on_device(sum, current_stream(output.device()).native_handle());
  return true;
}

void reduce_on_device(std::span<const at::Tensor> inputs, const Reduction& reduction,
                      const at::Tensor& output, at::Tensor& workspace, size_t group) {
  if (output.numel() == 0) return;
  if (group > 1 && group < inputs.size()) {
    const ReductionHops hops = hops_of(reduction, inputs.size());
    std::vector<at::Tensor> sums;
    for (size_t rank = 0; rank < inputs.size(); rank += group) {
      sums.push_back(at::empty({output.numel()}, output.options().dtype(*reduction.accumulate)));
      reduce_on_device(inputs.subspan(rank, group), hops.within_group, sums.back(), workspace);
    }
    return reduce_on_device(sums, hops.across_groups, output, workspace);
  }
  c10::SmallVector<const void*, DeviceSum::kMaxListed> addresses;
  for (const at::Tensor& input : inputs) addresses.push_back(input.const_data_ptr());
  if (reduce_in_one_kernel(addresses, inputs.front().scalar_type(), reduction, output, workspace))
    return;
  const auto ranks = static_cast<int>(inputs.size());
  const at::Tensor rows = rows_of(inputs);
  if (!rows.defined() || !reduce_rows(rows, reduction, SumOrder::of(ranks, ranks), output))
    reduce_step_by_step(inputs, reduction, output);
}

}  // namespace fsdp
