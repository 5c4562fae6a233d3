// One collective as data: what is asked for, on which tensors, and how these are divided among
// ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/comm/operation.h"
#include "fsdp/comm/work.h"

namespace fsdp {

// How the elements of one flat tensor are divided among the ranks of a communicator. Equal shares
// need no memory of their own, so that the everyday case allocates nothing.
class Shares {
 public:
  Shares() = default;

  // Every rank has `numel_per_rank`.
  static Shares equal(int64_t numel_per_rank, int ranks);

  // Rank r has `counts[r]`; zero is fine.
  static Shares uneven(std::span<const int64_t> counts);

  // `numel` cut into pieces of equal size except the last ones, each piece starting at a multiple
  // of `multiple`: how an all-reduce is divided into work for each rank.
  static Shares cut(int64_t numel, int ranks, int64_t multiple);

  int64_t count(int rank) const { return end(rank) - offset(rank); }
  int64_t offset(int rank) const;
  int64_t total() const { return ranks_ == 0 ? 0 : end(ranks_ - 1); }
  int64_t largest() const;
  int ranks() const { return ranks_; }
  bool is_equal() const { return ends_.empty(); }

 private:
  int64_t end(int rank) const;

  int ranks_ = 0;
  int64_t equal_count_ = 0;
  std::vector<int64_t> ends_;  // running sums; empty when the shares are equal
};

// What only operations on a device have. Apart from the others, which are moved faster without it.
struct OnDevice {
  c10::Stream called_on;                              // by the caller
  c10::Event ready;                                   // when that stream has produced the input
  std::optional<c10::Stream> runs_on = std::nullopt;  // set by the thread that runs it
};

// Where an element of a flat tensor is. A view of the tensor would cost more than a launch.
inline char* at_element(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) +
         element * static_cast<int64_t>(tensor.element_size());
}

struct Operation {
  Fingerprint print;
  Reduction reduction;
  at::Tensor output;     // flat and contiguous; undefined for a barrier
  at::Tensor input;      // the same tensor as output for all_reduce and broadcast
  Shares input_shares;   // how input is divided among ranks (reduce_scatter, all_to_all)
  Shares output_shares;  // how output is divided among ranks (all_gather, all_to_all)

  Work after;  // of another communicator; this operation begins when it has ended

  // What this rank receives from others, and since when: a limited bandwidth makes it last.
  int64_t received_bytes = 0;
  std::chrono::steady_clock::time_point moves_since = {};

  std::unique_ptr<OnDevice> on_device;  // where tensors are on one

  at::Device device() const { return output.defined() ? output.device() : at::Device(at::kCPU); }
};

}  // namespace fsdp
