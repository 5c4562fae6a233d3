// A collective in words and numbers: its kind, how ranks' values are combined, what the
// operation is called, and by what ranks recognise that they ask for the same thing; and the Work
// that it returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace c10 {
struct Event;
}

namespace fsdp {

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

// The use of the result: it replaces the output, or is added to it.
enum class Store : uint8_t { kWrite, kAdd };

const char* name_of(Store store);

// How values of several ranks become one. The ranks' values are combined in an order that depends
// on the communicator's size and sum_group() alone, so that the result is bitwise the same on every
// run and every backend.
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

// The purpose of a collective ("blocks.3 weight"); appears in errors and profiles. A fixed array,
// so that naming an operation allocates nothing and can travel to other ranks.
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

// Facts that must be equal on all ranks before data may move. Plain bytes: it is sent to other
// ranks.
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

// One call in a simulated world (World::simulated).
struct RecordedCall {
  std::string communicator;
  int first = 0;  // the world rank of its first member; with the name it tells which one it is
  int ranks = 0;
  int sum_group = 1;
  Fingerprint print;
};

// Shared by a simulated communicator and everything split from it, in the order of the calls.
using Recording = std::vector<RecordedCall>;

class OperationQueue;
class WorkState;

// The result of enqueueing a collective or an update: something to wait on, the same on CPUs and on
// devices.
//
// wait() on CPU tensors: returns when the data is there. On device tensors: returns when the
// collective is on its stream, and makes the caller's current stream wait for it; the host does
// not (Note [Tensors in use] in enqueued_operation.h says who keeps the tensors until then). A
// failed operation throws from every wait(). Dropping a Work does not cancel anything; a later call
// on the same communicator reports an error nobody waited for.
class Work {
 public:
  Work() = default;  // already done
  explicit Work(std::shared_ptr<WorkState> state) : state_(std::move(state)) {}

  void wait() const;
  bool done() const;

  // --- for those who run an operation that comes after this one ---

  // Blocks until this operation is done, leaving it to those who run it; throws its error.
  void wait_as_follower() const;
  // Marks its end on a device; nullptr when it has none. Only when done.
  const c10::Event* event() const;

 private:
  friend class OperationQueue;

  std::shared_ptr<WorkState> state_;
  // The operation that this one comes after, if any: wait() lends a hand there too. No further
  // back, or a long chain of operations would never be freed.
  std::shared_ptr<WorkState> after_;
};

}  // namespace fsdp
