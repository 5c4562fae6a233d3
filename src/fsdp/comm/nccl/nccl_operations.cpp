#include "fsdp/comm/nccl/nccl_operations.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "fsdp/comm/backends.h"
#include "fsdp/comm/reduce/reduce_ranks.h"
#include "fsdp/comm/reduce/sum_on_device.h"

namespace fsdp {

namespace {

// A reduction travels in parts: the other ranks' contributions lie side by side until they
// are added, and this bounds the memory for them.
constexpr int64_t kStagingBytes = int64_t{64} << 20;
// An all-reduce of no more than this is sent whole to everybody: one message instead of two.
constexpr int64_t kOneShotBytes = int64_t{64} << 10;

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
                               const CommOptions& options)
    : rank_(hosts.rank()),
      size_(hosts.size()),
      device_(device),
      reduce_(options.nccl_reduce),
      stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())),
      handle_(id, hosts, device, options),
      buffers_(handle_) {}

NcclOperations::~NcclOperations() { deregister_staging(); }

const at::Tensor& NcclOperations::staging_of(int64_t bytes) {
  if (staging_.empty() || staging_.back().numel() < bytes)
    staging_.push_back(at::empty({bytes}, at::device(device_).dtype(at::kByte)));
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

// Every other rank's contribution to this rank's share comes as it is and is added here, in rank
// order and in the accumulation type: the same bits as every other backend computes. In pieces of
// the largest share, so that all ranks take part in every piece.
void NcclOperations::reduce_share(const Operation& operation, const at::Tensor& output) {
  const Shares& shares = operation.input_shares;
  const at::ScalarType wire = operation.print.wire;
  if (reduce_ == NcclReduce::kNative && shares.is_equal() && at::isFloatingType(wire) &&
      is_sum(operation.reduction))
    return reduce_natively(operation, output);
  const int64_t width = static_cast<int64_t>(c10::elementSize(wire));
  const int64_t others = std::max(size_ - 1, 1);
  // Pieces begin at multiples of 128 elements, so that kernels can load 16 bytes at once.
  const int64_t fitting = std::max<int64_t>(kStagingBytes / width / others / 128 * 128, 128);
  const int64_t piece = size_ == 1 ? shares.largest() : std::min(fitting, shares.largest());
  for (int64_t begin = 0; begin < shares.largest(); begin += piece)
    reduce_piece(operation, output, begin, piece);
}

void NcclOperations::reduce_piece(const Operation& operation, const at::Tensor& output,
                                  int64_t begin, int64_t piece) {
  const Shares& shares = operation.input_shares;
  const at::ScalarType wire = operation.print.wire;
  const ncclDataType_t type = nccl_type(wire);
  const cudaStream_t stream = stream_;
  const auto count_of = [&](int of) {
    return std::clamp<int64_t>(shares.count(of) - begin, 0, piece);
  };
  const auto contribution_to = [&](int of) {
    return at_element(operation.input, shares.offset(of) + std::min(begin, shares.count(of)));
  };
  // This rank's own contribution is read where it is, unless there are too many to list them.
  const bool stages_own = size_ > DeviceSum::kMaxListed;
  const auto is_staged = [&](int peer) { return peer != rank_ || stages_own; };
  const int64_t mine = count_of(rank_);
  const int64_t mine_bytes = mine * static_cast<int64_t>(c10::elementSize(wire));
  const at::Tensor& staged = staging_of(mine_bytes * (stages_own ? size_ : size_ - 1));
  c10::SmallVector<void*, DeviceSum::kMaxListed> contributions;  // to this rank's share
  int64_t num_staged = 0;
  for (int peer = 0; peer < size_; ++peer)
    contributions.push_back(is_staged(peer) ? at_element(staged, mine_bytes * num_staged++)
                                            : contribution_to(peer));
  // Sends and receives have no symmetric kernels.
  if (num_staged > 0)
    buffers_.note(operation.print.kind, UserBuffers::kRegistered,
                  {used(operation.input), {staged.const_data_ptr(), mine_bytes * num_staged}});
  if (num_staged > 0)
    handle_.launch(operation.print, [&](ncclComm_t comm) {
      Calls calls;
      for (int peer = 0; peer < size_; ++peer) {
        if (!is_staged(peer)) continue;
        calls.add(ncclSend(contribution_to(peer), static_cast<size_t>(count_of(peer)), type, peer,
                           comm, stream));
        calls.add(ncclRecv(contributions[static_cast<size_t>(peer)], static_cast<size_t>(mine),
                           type, peer, comm, stream));
      }
      return calls.first();
    });
  if (mine == 0) return;
  const at::Tensor reduced = part_of(output, begin, mine);
  if (reduce_in_one_kernel(contributions, wire, operation.reduction, reduced, workspace_)) return;
  std::vector<at::Tensor> inputs;
  for (void* contribution : contributions)
    inputs.push_back(at::from_blob(contribution, {mine}, operation.input.options()));
  reduce_on_device(inputs, operation.reduction, reduced, workspace_);
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
  std::vector<at::Tensor> inputs;
  for (int peer = 0; peer < size_; ++peer) inputs.push_back(staged.narrow(0, peer * numel, numel));
  reduce_on_device(inputs, operation.reduction, tensor, workspace_);
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
