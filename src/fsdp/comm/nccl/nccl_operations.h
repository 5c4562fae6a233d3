// The parts of one collective over NCCL: its calls, and the kernels that add.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/nccl/nccl_handle.h"
#include "fsdp/comm/operation.h"
#include "fsdp/comm/reduce/reduce_ranks.h"

namespace fsdp {

// One rank of one communicator.
class NcclOperations {
 public:
  // Collective, as NcclHandle.
  NcclOperations(const ncclUniqueId& id, Communicator& hosts, c10::Device device,
                 const CommOptions& options, Messages messages, c10::cuda::CUDAStream stream);
  ~NcclOperations();

  NcclHandle& handle() { return handle_; }
  NcclBuffers& buffers() { return buffers_; }
  const NcclBuffers& buffers() const { return buffers_; }
  const c10::cuda::CUDAStream& stream() const { return stream_; }

  // Launches everything the operation consists of. stream() must be the current one.
  void run(const Operation& operation);

  // Lets NCCL use the memory in which reductions receive, as large as they have needed it, in
  // place; says whether it does now.
  bool has_staging() const { return !staging_.empty() && staging_.back().numel() > 0; }
  bool register_staging();
  void deregister_staging();

 private:
  void all_gather(const Operation& operation, const at::Tensor& output, const void* input,
                  const Shares& shares);
  void exchange(const Operation& operation);
  void broadcast(const Operation& operation);
  void reduce_share(const Operation& operation, const at::Tensor& output);
  // Elements of every share of an operation's input, from `begin` on in each.
  struct Piece {
    const Operation& operation;
    int64_t begin;
    int64_t numel;

    int64_t count(int of) const {
      return std::clamp<int64_t>(operation.input_shares.count(of) - begin, 0, numel);
    }
    char* contribution_to(int of) const {
      const Shares& shares = operation.input_shares;
      return at_element(operation.input, shares.offset(of) + std::min(begin, shares.count(of)));
    }
  };
  void reduce_piece(const Piece& piece, const at::Tensor& reduced);
  void reduce_piece_in_two_hops(const Piece& piece, const at::Tensor& reduced,
                                const SumOrder& order);
  // Adds what lies at these addresses.
  using Addresses = c10::SmallVector<void*, ReductionPieces::kMaxListed>;
  void add(const Addresses& inputs, at::ScalarType wire, const Reduction& reduction,
           const at::Tensor& sum);
  void note_staging(const Operation& operation, const at::Tensor& staged, int64_t bytes);
  void reduce_natively(const Operation& operation, const at::Tensor& output);
  void all_reduce(const Operation& operation);

  // Memory until the next call.
  const at::Tensor& staging_of(int64_t bytes);
  at::Tensor staging_for(at::ScalarType type, int64_t numel);

  const int rank_;
  const int size_;
  const c10::Device device_;
  const int sum_group_;
  const NcclReduce reduce_;
  const c10::cuda::CUDAStream stream_;
  NcclHandle handle_;
  NcclBuffers buffers_;
  void* registered_staging_ = nullptr;
  // Bytes; the last one is the largest. The first ones stay, because recorded steps use them.
  std::vector<at::Tensor> staging_;
  size_t num_recorded_ = 0;
  at::Tensor workspace_;  // of sums
};

}  // namespace fsdp
