// Collectives among the ranks of one group.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/operation.h"

namespace fsdp {

class NcclCalls;
struct Operation;
class Shares;

// With whom a rank of a communicator exchanges messages that are no part of NCCL's own collectives:
// these ranks are connected when it is made, so that no later operation waits for a connection.
// Others are by the first operation that needs them.
enum class Messages : uint8_t {
  kToAll,    // any operation
  kOfSums,   // with the ranks that add with this one (SumOrder)
  kToNobody  // it only gathers
};

// The needs of a communicator of some of another one's ranks.
struct SubgroupOptions {
  Messages messages = Messages::kToAll;
  // Over NCCL, the stream that communicators share, which the first of them fills in: a device has
  // few queues. All operations on it run in the order of the calls, which is then one order for all
  // of them, the same on every rank. nullptr: a stream of its own.
  std::optional<c10::Stream>* stream = nullptr;
};

// A communicator runs its collectives in the order in which they were enqueued, which must be the
// same on every rank; two communicators are independent of each other, unless they share a stream
// (SubgroupOptions). A call checks its arguments, enqueues and returns; `Work::wait()` makes the
// result usable. Until then the tensors must not be touched; the Work keeps them alive (Note
// [Tensors in use]).
//
// Tensors are contiguous; their shape does not matter, only their number of elements. All ranks use
// the same dtype. Operations that only move data take every dtype; reductions take fp64, fp32,
// fp16, bf16, int64, int32 and uint8. `counts`, where given, has one entry per rank and is the same
// on every rank; without it all ranks have equal shares.
//
// In place: all_gather when `input` is this rank's share of `output`; reduce_scatter when `output`
// is this rank's share of `input`. Any other overlap is refused.
//
// `after`: the operation begins when that Work, of another communicator, has ended, and its tensors
// may be that operation's; nobody has to wait in between. If that one failed, this one fails with
// its error. The ranks of a communicator need not agree on it, but must not chain in circles.
//
// One thread at a time may call a communicator. Backends: `threads`, `mpi`, `tcp`, `nccl`,
// `simulated`.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }

  // Values that are reduced are combined in groups of so many neighbours first, then the groups'
  // results, in binary trees (SumOrder): ranks of one host, unless CommOptions::sum_group says
  // otherwise.
  int sum_group() const { return sum_group_; }

  // output = input of rank 0, input of rank 1, ...
  Work all_gather(const at::Tensor& output, const at::Tensor& input, const Tag& tag,
                  std::span<const int64_t> counts = {}, const Work& after = {});

  // output = this rank's share of the ranks' inputs combined, or that added to output. The input's
  // dtype is what travels; output may be of any floating type if input is.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, const Reduction& reduction,
                      const Tag& tag, std::span<const int64_t> counts = {}, const Work& after = {});

  // tensor = the ranks' tensors combined, bitwise equal on all ranks.
  Work all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Tag& tag,
                  const Work& after = {});

  // Share r of input goes to rank r; share r of output comes from rank r. The counts may differ
  // from rank to rank, but what r sends to s must be what s expects from r.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const Tag& tag,
                  std::span<const int64_t> output_counts = {},
                  std::span<const int64_t> input_counts = {});

  // tensor = the tensor of rank `root`.
  Work broadcast(const at::Tensor& tensor, int root, const Tag& tag);

  // output = input, in the output's dtype, when what this rank enqueued here before has ended: for
  // memory that collectives use in turn. Moves nothing between ranks; every rank calls it.
  Work copy(const at::Tensor& output, const at::Tensor& input, const Tag& tag,
            const Work& after = {});

  // Done when every rank has come this far.
  Work barrier(const Tag& tag);

  // A communicator among the ranks whose color equals this rank's, in rank order. `colors` has one
  // entry per rank and is the same on every rank, so that membership needs no communication and a
  // simulated world can do it too. Every rank of this communicator calls it.
  std::unique_ptr<Communicator> split(std::span<const int> colors, std::string name,
                                      const SubgroupOptions& options = {});

  // Why a device cannot record this communicator's operations into a graph and replay them without
  // the host: words that follow a noun ("whose ..."), or "" if it can.
  virtual std::string why_not_recorded() const { return "whose host carries data between them"; }

  // Calls that only the backend `nccl` has; nullptr for the others.
  virtual NcclCalls* nccl() { return nullptr; }

  // Makes every wait of every rank fail with this message, now and later.
  virtual void abort(const std::string& message) = 0;

  // Throws if another rank has failed; never waits for one. Any thread may call it.
  virtual void throw_if_aborted() {}

  // Takes an operation that the calls above have checked; for communicators that pass some on. The
  // sequence number is the backend's to set.
  virtual Work enqueue(Operation operation) = 0;

  // For who has made the communicator of all ranks, and then learned where they are.
  void set_sum_group(int group) { sum_group_ = group; }

 protected:
  Communicator(int rank, int size, std::string name, int sum_group);

  // A communicator of some of this one's ranks.
  struct Subgroup {
    std::span<const int> colors;
    std::vector<int> members;  // this rank's color
    int rank;                  // of this one among them
    std::string name;
    int sum_group;
    SubgroupOptions options;

    int size() const { return static_cast<int>(members.size()); }
  };
  virtual std::unique_ptr<Communicator> split_off(Subgroup part) = 0;

 private:
  Shares shares_of(const at::Tensor& tensor, const char* what,
                   std::span<const int64_t> counts) const;

  const int rank_;
  const int size_;
  const std::string name_;
  int sum_group_;
};

}  // namespace fsdp
