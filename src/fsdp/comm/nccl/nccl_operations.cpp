#include "fsdp/comm/nccl/nccl_operations.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "fsdp/comm/backends.h"
#include "fsdp/comm/collective_cost.h"
#include "fsdp/comm/reduce/reduce_ranks.h"
#include "fsdp/comm/reduce/sum_on_device.h"

namespace fsdp {

namespace {

bool is_sum(const Reduction& reduction) {
  return reduction.op == ReduceOp::kSum || reduction.op == ReduceOp::kAvg;
}

bool is_watched(const Reduction& reduction) {
  return reduction.squares.defined() || reduction.nonfinite.defined();
}

// A part of a tensor of any shape, flat.
at::Tensor part_of(const at::Tensor& tensor, int64_t begin, int64_t numel) {
  if (begin == 0 && numel == tensor.numel() && tensor.dim() == 1) return tensor;
  return tensor.view(-1).narrow(0, begin, numel);
}

NcclBuffers::Used used(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes())};
}

// The ranks to which messages of ours will go.
std::vector<int> peers_of(const Communicator& ranks, Messages messages) {
  const SumOrder order{.ranks = ranks.size(), .group = ranks.sum_group()};
  std::vector<int> peers;
  for (int peer = 0; peer < ranks.size(); ++peer) {
    const bool is_met = messages == Messages::kToAll ||
                        (messages == Messages::kOfSums && order.adds_with(ranks.rank(), peer));
    if (is_met && peer != ranks.rank()) peers.push_back(peer);
  }
  return peers;
}

// Collects the first error of several calls.
class Calls {
 public:
  void add(ncclResult_t result) {
    if (first_ == ncclSuccess) first_ = result;
  }
  ncclResult_t first() const { return first_; }

 private:
  ncclResult_t first_ = ncclSuccess;
};

}  // namespace

NcclOperations::NcclOperations(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
                               const CommOptions& options, Messages messages,
                               c10::cuda::CUDAStream stream)
    : rank_(hosts.rank()),
      size_(hosts.size()),
      device_(device),
      sum_group_(hosts.sum_group()),
      reduce_(options.nccl_reduce),
      stream_(stream),
      handle_(id, hosts, device, options, peers_of(hosts, messages)),
      buffers_(handle_) {}

NcclOperations::~NcclOperations() { deregister_staging(); }

const at::Tensor& NcclOperations::staging_of(int64_t bytes) {
  const bool is_recorded =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  if (staging_.empty() || staging_.back().numel() < bytes) {
    const bool is_free =
        staging_.size() > num_recorded_ && staging_.back().const_data_ptr() != registered_staging_;
    if (is_free) staging_.pop_back();
    staging_.push_back(at::empty({bytes}, at::device(device_).dtype(at::kByte)));
  }
  if (is_recorded) num_recorded_ = staging_.size();
  return staging_.back();
}

// Must be called before a step is recorded: a recorded step goes on using the memory it knows.
bool NcclOperations::register_staging() {
  if (registered_staging_ != nullptr || !has_staging()) return registered_staging_ != nullptr;
  const int64_t bytes = staging_.back().numel();
  void* memory = nccl_allocate(bytes);
  if (!buffers_.add(memory, bytes, UserBuffers::kRegistered).empty()) {
    nccl_deallocate(memory);
    return false;
  }
  registered_staging_ = memory;
  staging_.push_back(at::from_blob(memory, {bytes}, staging_.back().options()));
  return true;
}

void NcclOperations::deregister_staging() {
  if (registered_staging_ == nullptr) return;
  std::erase_if(staging_, [&](const at::Tensor& piece) {
    return piece.const_data_ptr() == registered_staging_;
  });
  buffers_.release(registered_staging_);
  nccl_deallocate(std::exchange(registered_staging_, nullptr));
}

at::Tensor NcclOperations::staging_for(at::ScalarType type, int64_t numel) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(type));
  return staging_of(bytes).narrow(0, 0, bytes).view(type);
}

void NcclOperations::all_gather(const Operation& operation, const at::Tensor& output,
                                const void* input, const Shares& shares) {
  const ncclDataType_t type = nccl_type(output.scalar_type());
  const cudaStream_t stream = stream_;
  const int64_t width = output.element_size();
  buffers_.note(operation.print.kind,
                shares.is_equal() ? UserBuffers::kSymmetric : UserBuffers::kRegistered,
                {{input, shares.count(rank_) * width}, used(output)});
  handle_.launch(operation.print, [&](ncclComm_t comm) {
    if (shares.is_equal())
      return ncclAllGather(input, output.mutable_data_ptr(), static_cast<size_t>(shares.count(0)),
                           type, comm, stream);
    Calls calls;
    for (int root = 0; root < size_; ++root) {
      char* place = at_element(output, shares.offset(root));
      calls.add(ncclBroadcast(root == rank_ ? input : place, place,
                              static_cast<size_t>(shares.count(root)), type, root, comm, stream));
    }
    return calls.first();
  });
}

void NcclOperations::exchange(const Operation& operation) {
  const ncclDataType_t type = nccl_type(operation.print.wire);
  const cudaStream_t stream = stream_;
  const Shares& sent = operation.input_shares;
  const Shares& received = operation.output_shares;
  buffers_.note(operation.print.kind, UserBuffers::kRegistered,
                {used(operation.input), used(operation.output)});
  handle_.launch(operation.print, [&](ncclComm_t comm) {
    Calls calls;
    for (int peer = 0; peer < size_; ++peer) {
      calls.add(ncclSend(at_element(operation.input, sent.offset(peer)),
                         static_cast<size_t>(sent.count(peer)), type, peer, comm, stream));
      calls.add(ncclRecv(at_element(operation.output, received.offset(peer)),
                         static_cast<size_t>(received.count(peer)), type, peer, comm, stream));
    }
    return calls.first();
  });
}

void NcclOperations::broadcast(const Operation& operation) {
  buffers_.note(operation.print.kind, UserBuffers::kRegistered, {used(operation.output)});
  handle_.launch(operation.print, [&](ncclComm_t comm) {
    return ncclBroadcast(operation.input.const_data_ptr(), operation.output.mutable_data_ptr(),
                         static_cast<size_t>(operation.output.numel()),
                         nccl_type(operation.print.wire), operation.print.root, comm, stream_);
  });
}

// Contributions to this rank's share come as they are and are added here, in the accumulation type:
// the same bits as every other backend computes. In pieces of the largest share, so that all ranks
// take part in every piece.
void NcclOperations::reduce_share(const Operation& operation, const at::Tensor& output) {
  const Shares& shares = operation.input_shares;
  const at::ScalarType wire = operation.print.wire;
  if (reduce_ == NcclReduce::kNative && shares.is_equal() && at::isFloatingType(wire) &&
      is_sum(operation.reduction))
    return reduce_natively(operation, output);
  const SumOrder order = SumOrder::of(size_, sum_group_);
  const auto bytes_of = [](at::ScalarType type) {
    return static_cast<int64_t>(c10::elementSize(type));
  };
  const int64_t numel = ReductionPieces::of(order, shares.largest(), bytes_of(wire),
                                            bytes_of(type_between_hops(operation.reduction, wire)))
                            .numel;
  for (int64_t begin = 0; begin < shares.largest(); begin += numel) {
    const Piece piece{operation, begin, numel};
    const at::Tensor reduced = part_of(output, std::min(begin, output.numel()), piece.count(rank_));
    if (order.has_two_hops()) {
      reduce_piece_in_two_hops(piece, reduced, order);
    } else {
      reduce_piece(piece, reduced);
    }
  }
}

// All ranks' contributions arrive here, and are added.
void NcclOperations::reduce_piece(const Piece& piece, const at::Tensor& reduced) {
  const at::ScalarType wire = piece.operation.print.wire;
  const ncclDataType_t type = nccl_type(wire);
  const cudaStream_t stream = stream_;
  // This rank's own contribution is read where it is if a kernel takes a list of them.
  const bool is_listed = size_ <= DeviceSum::kMaxListed && at::isFloatingType(wire) &&
                         is_sum(piece.operation.reduction) &&
                         piece.operation.reduction.accumulate == at::kFloat;
  const bool stages_own = size_ > 1 && !is_listed;
  const auto is_staged = [&](int peer) { return peer != rank_ || stages_own; };
  const auto mine = static_cast<size_t>(reduced.numel());
  const int64_t mine_bytes = reduced.numel() * static_cast<int64_t>(c10::elementSize(wire));
  const at::Tensor& staged = staging_of(mine_bytes * (stages_own ? size_ : size_ - 1));
  Addresses contributions;
  int64_t num_staged = 0;
  for (int peer = 0; peer < size_; ++peer)
    contributions.push_back(is_staged(peer) ? at_element(staged, mine_bytes * num_staged++)
                                            : piece.contribution_to(peer));
  if (num_staged > 0) {
    note_staging(piece.operation, staged, mine_bytes * num_staged);
    handle_.launch(piece.operation.print, [&](ncclComm_t comm) {
      Calls calls;
      for (int peer = 0; peer < size_; ++peer) {
        if (!is_staged(peer)) continue;
        calls.add(ncclSend(piece.contribution_to(peer), static_cast<size_t>(piece.count(peer)),
                           type, peer, comm, stream));
        calls.add(
            ncclRecv(contributions[static_cast<size_t>(peer)], mine, type, peer, comm, stream));
      }
      return calls.first();
    });
  }
  add(contributions, wire, piece.operation.reduction, reduced);
}

// The ranks of this rank's group send it their contributions to all ranks at its place in a group,
// one after the other by the groups' order, which it adds; then these ranks send each other the
// sums. This rank takes part as every other: two kernels add, however many there are.
void NcclOperations::reduce_piece_in_two_hops(const Piece& piece, const at::Tensor& reduced,
                                              const SumOrder& order) {
  const Operation& operation = piece.operation;
  const ReductionHops hops = hops_of(operation.reduction, static_cast<size_t>(size_));
  const at::ScalarType wire = operation.print.wire;
  const at::ScalarType wide = type_between_hops(operation.reduction, wire);
  const auto width = static_cast<int64_t>(c10::elementSize(wire));
  const auto wide_width = static_cast<int64_t>(c10::elementSize(wide));
  const cudaStream_t stream = stream_;
  const int own_group = order.group_of(rank_);
  const int place = order.place_of(rank_);
  const int64_t mine = reduced.numel();
  c10::SmallVector<int64_t, 64> begins{0};  // of the sum for each group's rank
  for (int to = 0; to < order.num_groups(); ++to)
    begins.push_back(begins.back() + piece.count(order.rank_at(to, place)));
  const int64_t num_sums = begins.back();

  const int64_t sums_bytes = num_sums * wide_width;
  const int64_t arrived_bytes = order.num_groups() * mine * wide_width;
  const int64_t staged_bytes = sums_bytes + arrived_bytes + order.group * num_sums * width;
  const at::Tensor& staged = staging_of(staged_bytes);
  const auto sum_for = [&](int to) {
    return at_element(staged, begins[static_cast<size_t>(to)] * wide_width);
  };
  Addresses contributions;
  for (int member = 0; member < order.group; ++member)
    contributions.push_back(
        at_element(staged, sums_bytes + arrived_bytes + member * num_sums * width));
  Addresses arrived;
  for (int from = 0; from < order.num_groups(); ++from)
    arrived.push_back(at_element(staged, sums_bytes + from * mine * wide_width));

  note_staging(operation, staged, staged_bytes);
  handle_.launch(operation.print, [&](ncclComm_t comm) {
    Calls calls;
    const ncclDataType_t type = nccl_type(wire);
    for (int member = 0; member < order.group; ++member) {
      const int peer = order.rank_at(own_group, member);
      auto* const from_peer = static_cast<char*>(contributions[static_cast<size_t>(member)]);
      for (int to = 0; to < order.num_groups(); ++to) {
        const int its_owner = order.rank_at(to, member);
        calls.add(ncclSend(piece.contribution_to(its_owner),
                           static_cast<size_t>(piece.count(its_owner)), type, peer, comm, stream));
        calls.add(ncclRecv(from_peer + begins[static_cast<size_t>(to)] * width,
                           static_cast<size_t>(piece.count(order.rank_at(to, place))), type, peer,
                           comm, stream));
      }
    }
    return calls.first();
  });
  add(contributions, wire, hops.within_group,
      at::from_blob(sum_for(0), {num_sums}, reduced.options().dtype(wide)));
  handle_.launch(operation.print, [&](ncclComm_t comm) {
    Calls calls;
    const ncclDataType_t type = nccl_type(wide);
    for (int other = 0; other < order.num_groups(); ++other) {
      const int peer = order.rank_at(other, place);
      calls.add(ncclSend(sum_for(other), static_cast<size_t>(piece.count(peer)), type, peer, comm,
                         stream));
      calls.add(ncclRecv(arrived[static_cast<size_t>(other)], static_cast<size_t>(mine), type, peer,
                         comm, stream));
    }
    return calls.first();
  });
  add(arrived, wide, hops.across_groups, reduced);
}

// Sends and receives have no symmetric kernels.
void NcclOperations::note_staging(const Operation& operation, const at::Tensor& staged,
                                  int64_t bytes) {
  buffers_.note(operation.print.kind, UserBuffers::kRegistered,
                {used(operation.input), {staged.const_data_ptr(), bytes}});
}

void NcclOperations::add(const Addresses& inputs, at::ScalarType wire, const Reduction& reduction,
                         const at::Tensor& sum) {
  if (sum.numel() == 0 || reduce_in_one_kernel(inputs, wire, reduction, sum, workspace_)) return;
  std::vector<at::Tensor> tensors;
  for (void* input : inputs)
    tensors.push_back(at::from_blob(input, {sum.numel()}, sum.options().dtype(wire)));
  reduce_on_device(tensors, reduction, sum, workspace_);
}

// NCCL adds, into the output where nothing else has to be added or rounded. What it cannot do
// (wider results, accumulation, squares, NaNs) is one more pass over this rank's share.
void NcclOperations::reduce_natively(const Operation& operation, const at::Tensor& output) {
  const at::ScalarType wire = operation.print.wire;
  const Reduction& reduction = operation.reduction;
  const bool in_output = reduction.store == Store::kWrite && wire == output.scalar_type();
  const at::Tensor sum = in_output ? output : staging_for(wire, output.numel());
  const double scale = scale_of(reduction, static_cast<size_t>(size_));
  // Narrow factors would be rounded before they are multiplied with.
  const bool is_scaled_by_nccl = scale != 1.0 && wire == at::kFloat;
  buffers_.note(operation.print.kind, UserBuffers::kSymmetric, {used(operation.input), used(sum)});
  handle_.launch(operation.print, [&](ncclComm_t comm) {
    Calls calls;
    ncclRedOp_t op = ncclSum;
    auto factor = static_cast<float>(scale);
    if (is_scaled_by_nccl)
      calls.add(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
    calls.add(ncclReduceScatter(operation.input.const_data_ptr(), sum.mutable_data_ptr(),
                                static_cast<size_t>(output.numel()), nccl_type(wire), op, comm,
                                stream_));
    if (is_scaled_by_nccl) calls.add(ncclRedOpDestroy(op, comm));
    return calls.first();
  });
  Reduction rest = reduction;
  rest.op = ReduceOp::kSum;
  rest.scale = is_scaled_by_nccl ? 1.0 : scale;
  if (in_output && rest.scale == 1.0 && !is_watched(reduction)) return;
  reduce_on_device(std::span(&sum, 1), rest, output, workspace_);
}

void NcclOperations::all_reduce(const Operation& operation) {
  const at::Tensor& tensor = operation.output;
  // Squares and NaNs are counted by the rank that stores a share, so only a whole that nobody
  // counts may be computed by everybody.
  if (size_ == 1 || is_watched(operation.reduction) ||
      static_cast<int64_t>(tensor.nbytes()) > kOneShotBytes) {
    const Shares& shares = operation.output_shares;
    const at::Tensor own = part_of(tensor, shares.offset(rank_), shares.count(rank_));
    reduce_share(operation, own);
    if (size_ > 1) all_gather(operation, tensor, own.const_data_ptr(), shares);
    return;
  }
  const int64_t numel = tensor.numel();
  const at::Tensor staged = staging_for(operation.print.wire, numel * size_);
  all_gather(operation, staged, operation.input.const_data_ptr(), Shares::equal(numel, size_));
  reduce_rows_on_device(staged.view({size_, numel}), operation.reduction,
                        SumOrder::of(size_, sum_group_), tensor, workspace_);
}

void NcclOperations::run(const Operation& operation) {
  switch (operation.print.kind) {
    case OpKind::kAllGather:
      return all_gather(operation, operation.output, operation.input.const_data_ptr(),
                        operation.output_shares);
    case OpKind::kReduceScatter:
      return reduce_share(operation, operation.output);
    case OpKind::kAllReduce:
      return all_reduce(operation);
    case OpKind::kAllToAll:
      return exchange(operation);
    case OpKind::kBroadcast:
      return broadcast(operation);
    case OpKind::kCopy:
      operation.output.view(-1).copy_(operation.input.view(-1), /*non_blocking=*/true);
      return;
    case OpKind::kBarrier:
      return;  // has no tensor, so the hosts carry it out
  }
}

}  // namespace fsdp
