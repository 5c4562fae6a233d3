// One collective as data: what is asked for, on which tensors, how these are divided among ranks,
// and by what ranks recognise that they ask for the same thing.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

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

enum class OpKind : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kCopy,  // within this rank, between its collectives
};

const char* name_of(OpKind kind);

enum class ReduceOp : uint8_t { kSum, kAvg, kMax, kMin };

const char* name_of(ReduceOp op);

// What becomes of the result: it replaces the output, or is added to it.
enum class Store : uint8_t { kWrite, kAdd };

const char* name_of(Store store);

// How values of several ranks become one. The ranks' values are combined in rank order, so that the
// result is bitwise the same on every run and every backend.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  // The result is multiplied by this once, in the accumulation type (floating types only).
  double scale = 1.0;
  // The type of the running sum. Unset: fp64 if input or output is fp64, fp32 for other floating
  // types, int64 for whole numbers. A narrow input travels as it is and is rounded at most once,
  // when the result is stored.
  std::optional<at::ScalarType> accumulate = std::nullopt;
  // kAdd (reduce_scatter of floating sums and averages): output = output + result, added in the
  // accumulation type before the one rounding. How gradients of several microbatches meet.
  Store store = Store::kWrite;
  // Where defined, one fp32 element on the operation's device: becomes 1 when a value that this
  // rank computes and stores is NaN or Inf, and stays as it is otherwise. (In an all_reduce each
  // rank computes one share; together the ranks see all values.) Several operations may share it.
  at::Tensor nonfinite = {};
  // Where defined, one fp64 element on the operation's device: the sum of the squares of the values
  // that this rank computes and stores is added to it; not finite if and only if one of them is
  // not. Operations that share it must come one after the other.
  at::Tensor squares = {};
};

// What a collective is for ("blocks.3 weight"); appears in errors and profiles. A fixed array, so
// that naming an operation allocates nothing and can travel to other ranks.
class Tag {
 public:
  static constexpr size_t kMaxLength = 47;

  Tag() = default;
  // Not explicit: a tag is written where a collective is called, as its text.
  Tag(std::string_view text);
  Tag(const char* text) : Tag(std::string_view(text)) {}
  Tag(const std::string& text) : Tag(std::string_view(text)) {}

  std::string_view text() const { return text_.data(); }
  bool operator==(const Tag& other) const = default;

 private:
  std::array<char, kMaxLength + 1> text_{};  // zero-terminated; longer names are cut
};

// What must be equal on all ranks before data may move. Plain bytes: it is sent to other ranks.
struct Fingerprint {
  uint64_t sequence = 0;  // how many operations this communicator had before
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  Store store = Store::kWrite;
  at::ScalarType wire = at::kByte;
  at::ScalarType result = at::kByte;
  at::DeviceType device = at::kCPU;
  int32_t root = 0;
  int64_t bytes = 0;  // of the whole, unsharded side
  double scale = 1.0;
  Tag tag;

  bool operator==(const Fingerprint& other) const = default;

  // "operation 17: all_gather 'blocks.3' of 4096 bytes of BFloat16"
  std::string text() const;
};

// What only operations on a device have. Apart from the others, which are moved faster without it.
struct OnDevice {
  c10::Stream called_on;                              // by the caller
  c10::Event ready;                                   // when that stream has produced the input
  std::optional<c10::Stream> runs_on = std::nullopt;  // set by whoever runs the operation
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
