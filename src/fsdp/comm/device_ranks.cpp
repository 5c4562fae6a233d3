#include "fsdp/comm/device_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <vector>

#include "fsdp/comm/reduce_ranks.h"

namespace fsdp {

namespace {

at::Tensor share_of(const at::Tensor& tensor, const Shares& shares, int rank) {
  return tensor.view(-1).narrow(0, shares.offset(rank), shares.count(rank));
}

void copy_flat(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() > 0 && to.const_data_ptr() != from.const_data_ptr())
    to.view(-1).copy_(from.view(-1), /*non_blocking=*/true);
}

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

// As reduce_ranks does it: fp64 reaches a narrow type through fp32 rounded to odd, so that it is
// rounded once.
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

// The same arithmetic as reduce_ranks, in the same order: combine in the accumulation type, scale
// once, add to the output where asked, round once.
void reduce_share(Rendezvous& rendezvous, int rank, const Operation& operation,
                  const at::Tensor& output) {
  const at::ScalarType acc_type = *operation.reduction.accumulate;
  const auto input_of = [&](int from) {
    return share_of(rendezvous.of(from).input, operation.input_shares, rank).to(acc_type);
  };
  at::Tensor acc = input_of(0);
  for (int from = 1; from < rendezvous.ranks(); ++from)
    acc = combine(acc, input_of(from), operation.reduction.op);
  const double scale = scale_of(operation.reduction, static_cast<size_t>(rendezvous.ranks()));
  // A float factor, as on the host: a double one would be rounded differently by some kernels.
  if (scale != 1.0)
    acc = acc_type == at::kDouble ? acc * scale
                                  : acc * static_cast<double>(static_cast<float>(scale));
  const at::Tensor flat = output.view(-1);
  if (operation.reduction.store == Store::kAdd) acc = flat.to(acc_type) + acc;
  flat.copy_(rounded(acc, flat.scalar_type()), /*non_blocking=*/true);
  if (operation.reduction.nonfinite.defined() && at::isFloatingType(flat.scalar_type()))
    watch(operation.reduction.nonfinite, flat);
  if (operation.reduction.squares.defined())
    operation.reduction.squares.add_(flat.to(at::kDouble).square_().sum());
}

void copy_in(Rendezvous& rendezvous, int rank, Operation& operation) {
  const int ranks = rendezvous.ranks();
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      for (int step = 0; step < ranks; ++step) {
        const int from = (rank + step) % ranks;
        copy_flat(share_of(operation.output, operation.output_shares, from),
                  rendezvous.of(from).input);
      }
      return;
    case OpKind::kReduceScatter:
      return reduce_share(rendezvous, rank, operation, operation.output);
    case OpKind::kAllReduce:
      return reduce_share(rendezvous, rank, operation,
                          share_of(operation.output, operation.output_shares, rank));
    case OpKind::kAllToAll:
      for (int step = 0; step < ranks; ++step) {
        const int from = (rank + step) % ranks;
        const Operation& theirs = rendezvous.of(from);
        copy_flat(share_of(operation.output, operation.output_shares, from),
                  share_of(theirs.input, theirs.input_shares, rank));
      }
      return;
    case OpKind::kBroadcast:
      return copy_flat(operation.output, rendezvous.of(operation.print.root).input);
    case OpKind::kBarrier:
      return;
  }
}

}  // namespace

void follow_on_device(Operation& operation, std::optional<c10::Stream>& stream) {
  const c10::Event* ended = operation.after.event();
  if (ended == nullptr) return;
  const c10::Device device = operation.device();
  if (!stream) stream = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  operation.ready->block(*stream);
  ended->block(*stream);
  operation.ready->record(*stream);  // nobody has seen it yet: the ranks have not met
}

// Each rank's stream waits until every input is produced, reads, and records that it has read; then
// waits until everybody has read its own input. The events are shared through the operations, which
// stay in place until the last sync.
c10::Event run_on_device(Rendezvous& rendezvous, int rank, Operation& operation,
                         std::optional<c10::Stream>& stream) {
  const c10::Device device = operation.device();
  const c10::impl::VirtualGuardImpl guard_impl(device.type());
  if (!stream) stream = guard_impl.getNewStream(device);
  const c10::StreamGuard guard(*stream);
  const auto wait_for_everybody = [&] {
    for (int other = 0; other < rendezvous.ranks(); ++other)
      rendezvous.of(other).ready->block(*stream);
  };
  // `ready` is re-recorded for each phase: first "input produced" (by the caller's stream), then "I
  // have read". A sync between the last use of one meaning and the first of the next.
  const auto everybody_reaches_here = [&] {
    rendezvous.sync(rank);
    operation.ready->record(*stream);
    rendezvous.sync(rank);
    wait_for_everybody();
  };

  wait_for_everybody();
  copy_in(rendezvous, rank, operation);
  everybody_reaches_here();
  if (operation.print.kind == OpKind::kAllReduce) {
    for (int step = 1; step < rendezvous.ranks(); ++step) {
      const int from = (rank + step) % rendezvous.ranks();
      copy_flat(share_of(operation.output, operation.output_shares, from),
                share_of(rendezvous.of(from).output, operation.output_shares, from));
    }
    everybody_reaches_here();
  }
  c10::Event finished(device.type());
  finished.record(*stream);
  rendezvous.sync(rank);
  return finished;
}

}  // namespace fsdp
